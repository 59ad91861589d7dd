"""Which backend is fastest on this machine, for this model's shapes: measured, kept, and told to resolving.

:mod:`.store` reads what was measured and is all that an engine imports; :mod:`.measure` brings the conformance kit.
"""

__all__: list[str] = []
