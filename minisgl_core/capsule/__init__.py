"""Steps of a role as files: recorded in an engine, run again on any backend without the model, made small.

:mod:`.watch` sees the engine's eager steps, :mod:`.record` writes them, :mod:`.shadow` compares a second backend there;
:mod:`.base` and :mod:`.file` are what all capsules have in common, :mod:`.format` reads one, :mod:`.replay` runs it,
:mod:`.shrink` reduces it. What a role knows of its own lies in :mod:`.attention` and :mod:`.moe`, told to the others by
:mod:`.roles`. Import the modules themselves: most bring the conformance kit, which an engine that records nothing does
without.
"""

__all__: list[str] = []
