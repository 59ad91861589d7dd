"""Token-to-expert alignment: the (token, expert) pairs sorted by expert, each expert's stretch padded to whole blocks.

Shapes: T tokens, k experts per token, N = T * k pairs, numbered ``token * k + choice``; E experts; B rows of a block.
The order is stable, so the same routing gives the same result, bit for bit. Counting sort in two kernels: each program
counts a chunk of the pairs by expert, then each places its own chunk. Of a single chunk the second kernel counts too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..kernels import DEVICES, library
from ..launch import Form, Kernel, ceil_div, power_of_two

__all__ = ["MOST_BLOCK_M", "Alignment", "align", "block_bound"]

MOST_BLOCK_M = 128
_MOST_CHUNKS = 128
_COUNT_ROWS, _BLOCKS = 16, 64


def block_bound(pairs: int, experts: int, block_m: int) -> int:
    """Upper bound of the blocks of ``pairs`` pairs, however they are distributed: every expert may waste most of one
    block.
    """
    filled = min(pairs, experts)
    return (pairs - filled) // block_m + filled


class Alignment(NamedTuple):
    """The output of :func:`align`, sized for the largest call."""

    slots: torch.Tensor
    """(padded pairs,) int32: the pair in each row; N where the row is padding"""
    experts: torch.Tensor
    """(blocks,) int32: the expert of each block."""
    total: torch.Tensor
    """(1,) int32: rows in use, a multiple of B"""
    counts: torch.Tensor
    """scratch: pairs by chunk and expert"""

    @classmethod
    def empty(cls, pairs: int, experts: int, device: torch.device) -> Alignment:
        """For up to ``pairs`` pairs and blocks of 16 to ``MOST_BLOCK_M`` rows."""

        def ints(count: int) -> torch.Tensor:
            return torch.empty(count, dtype=torch.int32, device=device)

        rows = block_bound(pairs, experts, MOST_BLOCK_M) * MOST_BLOCK_M
        blocks = block_bound(pairs, experts, 16)
        return cls(ints(rows), ints(blocks), ints(1), ints(_MOST_CHUNKS * power_of_two(experts)))


@triton.jit
def _load_ids(ids_ptr, at, pairs, num_experts):
    """Load expert ids; -1 for padding and past the end."""
    ids = tl.load(ids_ptr + at, mask=at < pairs, other=-1)
    return tl.where((ids >= 0) & (ids < num_experts), ids, -1)


@triton.jit
def _tally(ids, lanes):
    """ids (C,), lanes (L,) -> how many ids equal each lane."""
    return tl.sum((ids[:, None] == lanes[None, :]).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["pairs", "steps", "num_experts"])
def _count_kernel(ids_ptr, counts_ptr, pairs, steps, num_experts, LANES: tl.constexpr, STEP: tl.constexpr):
    chunk = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    counts = tl.zeros((LANES,), tl.int32)
    for step in range(steps):
        at = (chunk * steps + step) * STEP + tl.arange(0, STEP)
        counts += _tally(_load_ids(ids_ptr, at, pairs, num_experts), lanes)
    tl.store(counts_ptr + chunk * LANES + lanes, counts)


@triton.jit(do_not_specialize=["pairs", "steps", "chunks", "bound", "num_experts", "block_m"])
def _place_kernel(
    ids_ptr,
    slots_ptr,
    experts_ptr,
    total_ptr,
    counts_ptr,
    pairs,
    steps,
    chunks,
    bound,
    num_experts,
    block_m,
    ONE_CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Programs below ``chunks`` place one chunk each, the next one fills the padding, the others write the blocks'
    experts.
    """
    program = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    steps_in = tl.arange(0, STEP)
    before = tl.zeros((LANES,), tl.int32)
    counts = tl.zeros((LANES,), tl.int32)
    if ONE_CHUNK:
        counts += _tally(_load_ids(ids_ptr, steps_in, pairs, num_experts), lanes)
    else:
        for first in range(0, chunks, ROWS):
            rows = first + tl.arange(0, ROWS)
            at = counts_ptr + rows[:, None] * LANES + lanes[None, :]
            found = tl.load(at, mask=rows[:, None] < chunks, other=0)
            counts += tl.sum(found, axis=0)
            before += tl.sum(tl.where(rows[:, None] < program, found, 0), axis=0)
    padded = (counts + block_m - 1) // block_m * block_m
    ends = tl.cumsum(padded, axis=0)
    if program < chunks:
        free = ends - padded + before
        for step in range(steps):
            at = (program * steps + step) * STEP + steps_in
            ids = _load_ids(ids_ptr, at, pairs, num_experts)
            mine = ids[:, None] == lanes[None, :]
            earlier = (ids[:, None] == ids[None, :]) & (steps_in[None, :] < steps_in[:, None])
            place = tl.sum(tl.where(mine, free[None, :], 0), axis=1) + tl.sum(earlier.to(tl.int32), axis=1)
            tl.store(slots_ptr + place, at, mask=ids >= 0)
            free += tl.sum(mine.to(tl.int32), axis=0)
    elif program == chunks:
        tl.store(total_ptr, tl.sum(padded, axis=0))
        for row in range(0, block_m, 16):
            tail = (ends - padded + counts)[:, None] + (row + tl.arange(0, 16))[None, :]
            tl.store(slots_ptr + tail, tl.zeros((LANES, 16), tl.int32) + pairs, mask=tail < ends[:, None])
    else:
        block = (program - chunks - 1) * BLOCKS + tl.arange(0, BLOCKS)
        passed = (ends[None, :] <= block[:, None] * block_m).to(tl.int32)
        tl.store(experts_ptr + block, tl.sum(passed, axis=1), mask=block < bound)


_COUNT, _PLACE = Kernel(_count_kernel), Kernel(_place_kernel)


class _Cut(NamedTuple):
    """How the kernels split the pairs."""

    steps: int
    chunks: int
    bound: int
    """Upper bound of the number of blocks."""
    programs: int
    counting: Form
    placing: Form


@lru_cache(maxsize=1024)
def _cut(pairs: int, num_experts: int, block_m: int, most_chunks: int) -> _Cut:
    lanes = power_of_two(num_experts)
    step = max(16, min(128, 16384 // lanes, power_of_two(pairs)))
    steps = ceil_div(pairs, step * most_chunks)
    chunks = ceil_div(pairs, step * steps)
    bound = block_bound(pairs, num_experts, block_m)
    warps = 16 if step * lanes > 8192 else 8  # registers for a (step, lanes) matrix
    return _Cut(
        steps,
        chunks,
        bound,
        chunks + 1 + ceil_div(bound, _BLOCKS),
        _COUNT.form((lanes, step), warps=8),
        _PLACE.form((int(chunks == 1), lanes, step, _COUNT_ROWS, _BLOCKS), warps=warps),
    )


def _align(
    slots: torch.Tensor,
    experts: torch.Tensor,
    total: torch.Tensor,
    counts: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    block_m: int,
) -> None:
    pairs = ids.numel()
    steps, chunks, bound, programs, counting, placing = _cut(pairs, num_experts, block_m, _MOST_CHUNKS)
    if chunks > 1:
        counting.launch((chunks, 1), (ids, counts), (pairs, steps, num_experts))
    numbers = (pairs, steps, chunks, bound, num_experts, block_m)
    placing.launch((programs, 1), (ids, slots, experts, total, counts), numbers)


align = library.register(
    "align(Tensor(a!) slots, Tensor(b!) experts, Tensor(c!) total, Tensor(d!) counts, Tensor ids, int num_experts, "
    "int block_m) -> ()",
    _align,
    DEVICES,
)
"""ids (T, k) int32, contiguous -> an :class:`Alignment` in blocks of ``block_m``; ids outside [0, E) are left out"""
