"""Steps of attention as files: recorded in an engine, run again on any backend without the model, made small.

:mod:`.watch` sees the engine's eager steps, :mod:`.record` writes them, :mod:`.shadow` compares a second backend there;
:mod:`.format` is the file, :mod:`.replay` runs it, :mod:`.shrink` reduces it. Import the modules themselves: most bring
the conformance kit, which an engine that records nothing does without.
"""

__all__: list[str] = []
