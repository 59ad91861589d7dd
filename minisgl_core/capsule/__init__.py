"""Step recordings, called capsules: steps of a role as files, replayed on any backend without the model, and shrunk.

:mod:`.instrumentation` holds the settings, :mod:`.observer` is the engine's observer made from them; :mod:`.record`
writes steps and :mod:`.shadow` compares a second backend there. :mod:`.base` and :mod:`.file` hold what all capsules
share; :mod:`.format` reads a capsule, :mod:`.replay` runs it, :mod:`.shrink` reduces it. What is particular to a role
is in :mod:`.attention` and :mod:`.moe`, which :mod:`.roles` lists. Import the modules themselves: most import the
conformance kit, which an engine without instrumentation does not need.
"""

__all__: list[str] = []
