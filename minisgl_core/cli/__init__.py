"""The command line: ``minisgl COMMAND``. Each command is a module, imported when it is run."""

__all__: list[str] = []
