"""Memory of captured steps.

As on a device, the memory of a tensor that the step has dropped is reused for later ones, and all graphs of a runner
share one pool, because only one of them runs at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch.utils import _pytree as pytree

from .trace import OpRecord, StorageUse, TensorRef, Trace

__all__ = ["MemoryPool"]

ALIGNMENT = 64
"""Alignment in bytes, as in torch's CPU allocator."""


class MemoryPool:
    """One block of memory for the short-lived tensors of all graphs. Capture the largest graph first."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Size of the present block."""
        return self._block.numel()

    def absorb(self, trace: Trace) -> None:
        """Move all storages of ``trace`` that only the trace still references into the block."""
        aliases = Counter(ref.storage for record in trace.ops for ref in (*record.inputs, *record.output_refs))
        dropped = [use for use in trace.storages if not use.external and _is_dropped(use, aliases[use.index])]
        offsets, total = _lay_out(dropped)
        if total > self._block.numel():
            self._block = torch.empty(total, dtype=torch.uint8)
        for record in trace.ops:
            self._move(record, offsets)
        for use in dropped:
            use.holder = self._block

    def _move(self, record: OpRecord, offsets: dict[int, int]) -> None:
        def move(alias: torch.Tensor, refs: Iterator[TensorRef]) -> torch.Tensor:
            ref = next(refs)
            return self._view(ref, offsets[ref.storage]) if ref.storage in offsets else alias

        inputs, outputs = iter(record.inputs), iter(record.output_refs)
        arguments = (record.args, record.kwargs)
        record.args, record.kwargs = pytree.tree_map_only(torch.Tensor, lambda t: move(t, inputs), arguments)
        record.outputs = tuple(move(t, outputs) for t in record.outputs)

    def _view(self, ref: TensorRef, start: int) -> torch.Tensor:
        first = start // ref.dtype.itemsize + ref.offset
        view = torch.empty(0, dtype=ref.dtype)
        return view.set_(self._block.untyped_storage(), first, ref.shape, ref.stride)


def _is_dropped(use: StorageUse, aliases: int) -> bool:
    """True if only the trace's aliases, its holder and the storage object made here reference the memory."""
    storage = use.holder.untyped_storage()
    movable = use.holder.device.type == "cpu" and not use.holder.is_complex() and storage.nbytes() > 0
    return movable and torch._C._storage_Use_Count(storage._cdata) == aliases + 2


def _lay_out(uses: list[StorageUse]) -> tuple[dict[int, int], int]:
    """First fit over time: byte offset of each storage, and the bytes needed."""
    offsets: dict[int, int] = {}
    live: list[tuple[int, int, int]] = []  # (offset, end, last operation), by offset
    total = 0
    for use in sorted(uses, key=lambda u: u.first):
        size = -(-use.holder.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        live = [block for block in live if block[2] >= use.first]
        start = 0
        for offset, end, _ in live:
            if start + size <= offset:
                break
            start = max(start, end)
        offsets[use.index] = start
        live.append((start, start + size, use.last))
        live.sort()
        total = max(total, start + size)
    return offsets, total
