"""Role ``platform``: the only way to streams, events, pinned memory and capture.

Plugins take these from their Setup instead of ``torch.cuda``, so that the same code runs on the CPU stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

__all__ = ["CapturedGraph", "Event", "MemoryGauge", "Platform"]


class Event(Protocol):
    """A point in a stream's work."""

    def record(self) -> None:
        """Mark the present end of the current stream's work."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until the mark is reached; returns at once if never recorded."""
        ...

    def query(self) -> bool:
        """Has the mark been reached?"""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this mark to a later one; both made with ``timing=True`` and reached."""
        ...


class CapturedGraph(Protocol):
    """A recorded step."""

    def replay(self) -> None: ...

    def close(self) -> None: ...


class Platform(Protocol):
    """One device of this process. Built as ``Class(device_index)``."""

    name: str
    device: torch.device
    sm: int
    """Compute capability such as 90; 0 where there is none."""

    def activate(self) -> None:
        """Make the device and the engine's stream current on this thread."""
        ...

    def new_event(self, *, timing: bool = False) -> Event: ...

    def wait_event(self, event: Event) -> None:
        """Make the current stream wait for an event."""
        ...

    def stream_handle(self) -> int:
        """The current stream as the number that launchers outside torch take; 0 where there are no streams."""
        ...

    def side_stream(self) -> AbstractContextManager[None]:
        """Work inside runs concurrently with the engine's stream (for copies to the host)."""
        ...

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies can read asynchronously."""
        ...

    def synchronize(self) -> None: ...

    def free_bytes(self) -> int:
        """Memory that could be allocated now; what allocators keep without using it counts as free."""
        ...

    def total_bytes(self) -> int: ...

    def can_capture(self) -> bool: ...

    def capture(self, step: Callable[[], Any], pool: Any | None) -> tuple[CapturedGraph, Any, Any]:
        """Record ``step()``: returns (graph, what step returned, memory pool to share with further captures)."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class MemoryGauge(Protocol):
    """An optional part of a platform: with it, passes and graphs are tried out before the KV pool is sized."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Call ``work`` and wait for it: the most memory it took at once, beyond what was taken when it began."""
        ...
