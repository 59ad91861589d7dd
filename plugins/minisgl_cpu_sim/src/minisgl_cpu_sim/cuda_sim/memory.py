"""The memory of a simulated kernel: copies of its arrays, far apart, so that an out-of-bounds access never hits
another.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

__all__ = ["Array", "Extent", "extent_of", "placed"]

Array = np.ndarray | torch.Tensor
"""An array on the host; strides must not be negative."""

COPY_LIMIT = 64 * 2**20
"""Larger spans are used in place: their pages may never have been touched, and no small span is next to them."""
GAP = 16 * 2**20
ALIGNMENT = 4096
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes that belong to an array: ``rows`` runs of ``row_bytes``, ``stride`` bytes apart, from ``address`` on."""

    address: int
    rows: int
    row_bytes: int
    stride: int

    @property
    def span(self) -> int:
        """Bytes from the first to past the last one."""
        return (self.rows - 1) * self.stride + self.row_bytes if self.rows else 0


class _Group(NamedTuple):
    """Extents with overlapping spans, which move together so that aliases remain aliases."""

    begin: int
    end: int
    members: list[int]


def extent_of(array: Array) -> Extent:
    """The extent of an array. Gaps between rows of a view are excluded; gaps at several levels are not."""
    address, item, dims = _layout(array)
    if any(size == 0 for size, _ in dims):
        return Extent(address, 0, 0, item)
    dims = sorted(((size, stride) for size, stride in dims if size > 1 and stride != 0), key=lambda dim: dim[1])
    if any(stride < 0 for _, stride in dims):
        raise ValueError("an array with a negative stride cannot be a kernel's buffer")
    span = item + sum((size - 1) * stride for size, stride in dims)
    row = item
    while dims and dims[0][1] == row:
        row *= dims.pop(0)[0]
    if not dims:
        return Extent(address, 1, row, row)
    rows, stride = dims.pop(0)
    while dims and dims[0][1] == rows * stride:
        rows *= dims.pop(0)[0]
    return Extent(address, rows, row, stride) if not dims else Extent(address, 1, span, span)


def _layout(array: Array) -> tuple[int, int, list[tuple[int, int]]]:
    """(address, item size, [(size, stride in bytes)])"""
    if isinstance(array, torch.Tensor):
        if array.device.type != "cpu":
            raise ValueError(f"a buffer is on {array.device}; the simulator runs on host memory")
        item = array.element_size()
        return array.data_ptr(), item, [(n, s * item) for n, s in zip(array.shape, array.stride(), strict=True)]
    return array.ctypes.data, array.itemsize, list(zip(array.shape, array.strides, strict=True))


@contextmanager
def placed(extents: Sequence[Extent]) -> Iterator[list[int]]:
    """Place the extents while the kernel runs; copies are written back unless an error is raised."""
    groups = _groups(extents)
    copied = [group for group in groups if group.end - group.begin <= COPY_LIMIT]
    moves, total = [], GAP
    for group in copied:
        offset = total + group.begin % ALIGNMENT  # a misaligned view stays misaligned
        moves.append((group, offset))
        total = -(-(offset + group.end - group.begin + GAP) // ALIGNMENT) * ALIGNMENT
    pool = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(pool))
    addresses = [extent.address for extent in extents]
    for group, offset in moves:
        ctypes.memmove(base + offset, group.begin, group.end - group.begin)
        for member in group.members:
            addresses[member] += base + offset - group.begin
    yield addresses
    for group, offset in moves:
        ctypes.memmove(group.begin, base + offset, group.end - group.begin)


def _groups(extents: Sequence[Extent]) -> list[_Group]:
    groups: list[_Group] = []
    for i in sorted(range(len(extents)), key=lambda i: extents[i].address):
        begin, end = extents[i].address, extents[i].address + extents[i].span
        if groups and begin < groups[-1].end:
            last = groups.pop()
            groups.append(_Group(last.begin, max(last.end, end), [*last.members, i]))
        else:
            groups.append(_Group(begin, end, [i]))
    return groups
