"""Settings of the command line: one TOML file, ``MINISGL_*`` variables and flags.

Import :mod:`.load` and :mod:`.schema` where settings are used; they bring pydantic, which this package's name must not.
"""

__all__: list[str] = []
