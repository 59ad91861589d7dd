"""Host memory for asynchronous copies, safe with several batches in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .platform import Platform

__all__ = ["PinnedRing"]


class PinnedRing:
    """``depth`` pinned buffers used in turn; one is handed out again only after the copy that read it is done.

    ``with ring.borrow() as buffer:`` fill the buffer and start the copy inside the block; leaving it records the event.
    """

    def __init__(self, platform: Platform, shape: tuple[int, ...], dtype: torch.dtype, depth: int = 2) -> None:
        if depth < 2:
            raise ValueError(f"a PinnedRing needs a depth of at least 2, got {depth}")
        self._buffers = [platform.empty_pinned(shape, dtype) for _ in range(depth)]
        self._events = [platform.new_event() for _ in range(depth)]
        self._next = 0

    def borrow(self) -> _Borrowed:
        """The next buffer, waiting for its last copy if that is still under way."""
        index, self._next = self._next, (self._next + 1) % len(self._buffers)
        self._events[index].synchronize()
        return _Borrowed(self, index)


class _Borrowed:
    def __init__(self, ring: PinnedRing, index: int) -> None:
        self._ring, self._index = ring, index

    def __enter__(self) -> torch.Tensor:
        return self._ring._buffers[self._index]

    def __exit__(self, *_: object) -> None:
        self._ring._events[self._index].record()
