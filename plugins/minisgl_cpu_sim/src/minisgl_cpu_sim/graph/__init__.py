"""CUDA-graph semantics on a CPU, and strict checks of captured steps.

For plugin authors: ``EmulatedGraph.capture(step)``, its ``replay()`` and ``ops``, and :func:`strict_check`.
"""

from __future__ import annotations

from .emulated import EmulatedGraph
from .memory import MemoryPool
from .options import EmulatedGraphOptions
from .poison import Rows
from .runner import EmulatedGraphRunner
from .strict import StrictReplay, check_inputs, strict_check
from .trace import OpRecord, Trace
from .violation import GraphViolation

__all__ = [
    "EmulatedGraph",
    "EmulatedGraphOptions",
    "EmulatedGraphRunner",
    "GraphViolation",
    "MemoryPool",
    "OpRecord",
    "Rows",
    "StrictReplay",
    "Trace",
    "check_inputs",
    "strict_check",
]
