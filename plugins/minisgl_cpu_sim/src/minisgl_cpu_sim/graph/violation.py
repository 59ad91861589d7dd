"""Violations that the strict checks report."""

from __future__ import annotations

from typing import Literal

__all__ = ["GraphViolation", "ViolationKind"]

ViolationKind = Literal[
    "stale_buffer",
    "moved_pointer",
    "frozen_value",
    "changed_shape",
    "control_flow",
    "host_read",
    "host_copy",
    "dynamic_shape",
    "random",
    "storage",
    "different_value",
    "poison",
    "growing_memory",
]
"""stale_buffer: an input buffer does not hold what the host's records say. moved_pointer: a tensor read from outside
lies at another address than at capture. frozen_value, changed_shape, control_flow: the Python step would now run
other operations, or with other arguments or shapes, than the recorded ones. host_read: the host waits for a device
value. host_copy: pageable host memory is copied into the step. dynamic_shape: a shape depends on device data. random:
the step draws random numbers. storage: an operation resizes or swaps storage. different_value: an operation gives
another result on the same inputs. poison: NaN of a padding row or of a free page reached something live.
growing_memory: every step leaves tensors behind."""


class GraphViolation(RuntimeError):
    """A captured step does what a device graph cannot do, or its replay would be wrong.

    ``kind`` says what; ``name`` is the buffer or operation at fault; ``detail`` what was found there.
    """

    def __init__(self, kind: ViolationKind, name: str, detail: str) -> None:
        self.kind, self.name, self.detail = kind, name, detail
        super().__init__(f"{kind}: {name}: {detail}")
