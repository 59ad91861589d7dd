"""Sampling without a host sync: true argmax, Gumbel noise from (seed, position, token id), top-k, top-p and min-p.

Launches: each row's maximum over slices of the vocabulary; with filters two more, ``filter.py``, that sample most rows
outright; the best score over slices for the other rows, then over the slices of a row. Noise and filters are those of
the core's composed ``sample``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kernels import DEVICES, library
from .filter import finish_kernel, gather_kernel, ordered
from .noise import gumbel, row_key

__all__ = ["sample"]

BLOCK = 4096
GREEDY, RANDOM, FILTERED = 0, 1, 2
GROUPS = 1024
"""At most so many groups of tokens of a row have their maxima noted."""
ROOM = 2048
"""Tokens of a row that can be gathered. Of independent logits the usual bound lets two per group through."""
GATHERERS = 1024
"""About so many programs gather; a row has at least one, at most one per slice."""
ORDER_BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}
"""Upper bits of a float32 that values of the type use, rounded up to an even number"""


@triton.jit
def _max_kernel(
    logits_ptr,
    top_ptr,
    id_ptr,
    group_ptr,
    count_ptr,
    total_ptr,
    stride,
    vocab,
    slices,
    FILTER: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_SLICE: tl.constexpr,
):
    """Per (row, slice): the largest logit and its lowest id; NaN if any logit of the slice is NaN. FILTER: also the
    maxima of its groups, and zeros for the kernels that count.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    broken = tl.sum((x != x).to(tl.int32), axis=0) > 0
    top, at = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(top_ptr + row * slices + part, tl.where(broken, float("nan"), top))
    tl.store(id_ptr + row * slices + part, part * BLOCK + at)
    if FILTER:
        high = tl.max(tl.reshape(x, [PER_SLICE, BLOCK // PER_SLICE]), axis=1)
        tl.store(group_ptr + (row * slices + part) * PER_SLICE + tl.arange(0, PER_SLICE), high)
        if part == 0:
            tl.store(count_ptr + row, 0)
            tl.store(total_ptr + row, tl.full([], 0, tl.int64))


@triton.jit
def _score_kernel(
    logits_ptr,
    top_ptr,
    temperature_ptr,
    seed_lo_ptr,
    seed_hi_ptr,
    positions_ptr,
    floor_ptr,
    last_ptr,
    chosen_ptr,
    score_ptr,
    id_ptr,
    float_stride,
    int_stride,
    position_stride,
    stride,
    vocab,
    slices,
    FILTER: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Per (row, slice) of rows with a temperature and no token yet: the best noisy score and its lowest id."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row * float_stride)
    open_row = temperature > 0.0
    if FILTER:
        open_row = open_row & (tl.load(chosen_ptr + row) < 0)
    if open_row:
        others = tl.arange(0, SLICES)
        top = tl.max(tl.load(top_ptr + row * slices + others, mask=others < slices, other=float("-inf")), axis=0)
        token = part * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        x = tl.load(logits_ptr + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
        key = row_key(
            tl.load(seed_lo_ptr + row * int_stride),
            tl.load(seed_hi_ptr + row * int_stride),
            tl.load(positions_ptr + row * position_stride),
        )
        score = (x - top) / temperature + gumbel(key, token)
        keep = inside
        if FILTER:
            order, floor = ordered(x), tl.load(floor_ptr + row)
            keep = inside & ((order > floor) | ((order == floor) & (token <= tl.load(last_ptr + row))))
        best, at = tl.max(
            tl.where(keep, score, float("-inf")), axis=0, return_indices=True, return_indices_tie_break_left=True
        )
        tl.store(score_ptr + row * slices + part, best)
        tl.store(id_ptr + row * slices + part, part * BLOCK + at)


@triton.jit
def _pick_kernel(
    out_ptr,
    top_ptr,
    top_id_ptr,
    score_ptr,
    score_id_ptr,
    chosen_ptr,
    temperature_ptr,
    float_stride,
    slices,
    RANDOM: tl.constexpr,
    FILTER: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Per row: its token if it has one, else the winner of its slices; -1 if any slice holds a NaN."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SLICES)
    inside = part < slices
    top = tl.load(top_ptr + row * slices + part, mask=inside, other=float("-inf"))
    broken = tl.sum((top != top).to(tl.int32), axis=0) > 0
    top = tl.where(top != top, 0.0, top)
    _, at = tl.max(top, axis=0, return_indices=True, return_indices_tie_break_left=True)
    chosen = tl.load(top_id_ptr + row * slices + at)
    if RANDOM:  # noqa: SIM102 - one is decided at compile time
        if tl.load(temperature_ptr + row * float_stride) > 0.0:
            early = tl.full([], -1, tl.int32)
            if FILTER:
                early = tl.load(chosen_ptr + row)
            if early < 0:
                score = tl.load(score_ptr + row * slices + part, mask=inside, other=float("-inf"))
                _, best = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
                early = tl.load(score_id_ptr + row * slices + best)
            chosen = early
    tl.store(out_ptr + row, tl.where(broken, -1, chosen))


def _arrays(like: torch.Tensor, number: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """So many, at least of that size, aligned alike for every size: Triton compiles for each alignment anew."""
    return like.new_empty((number, size + -size % 4), dtype=dtype).unbind()


def filter_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed_lo: torch.Tensor,
    seed_hi: torch.Tensor,
    positions: torch.Tensor,
    tops: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    counters: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``tops``: per slice the maximum and its id, and the maxima of its groups; ``counters``: a zero int32 and a zero
    int64 per row. Returns (floor, last, chosen), int32 of at least B: rows survive down to the token whose logit has
    the order ``floor`` and whose id is ``last``; -1 where the token is still to be chosen.
    """
    rows, vocab = logits.shape
    slices = triton.cdiv(vocab, BLOCK)
    wide, per_slice = _widths(slices)
    groups = triton.cdiv(vocab, BLOCK // per_slice)
    near_x = logits.new_empty((rows, ROOM), dtype=torch.float32)
    near_id = logits.new_empty((rows, ROOM), dtype=torch.int32)
    bound, floor, last, chosen = _arrays(logits, 4, rows, torch.int32)
    stride, floats, ints = logits.stride(0), temperature.stride(0), top_k.stride(0)
    gather_kernel[(rows, min(slices, triton.cdiv(GATHERERS, rows)))](
        logits, tops[0], tops[2], temperature, top_k, top_p, min_p, bound, *counters, near_x, near_id, floats, ints,
        stride, vocab, slices, groups, groups - groups // 8, BLOCK=BLOCK, SLICES=wide, PER_SLICE=per_slice,
        GROUPS=triton.next_power_of_2(groups), ROOM=ROOM, num_warps=8,
    )  # fmt: skip
    finish_kernel[(rows,)](
        logits, tops[0], tops[1], temperature, top_k, top_p, min_p, seed_lo, seed_hi, positions, bound, *counters,
        near_x, near_id, floor, last, chosen, floats, ints, positions.stride(0), stride, vocab, slices, BLOCK=BLOCK,
        SLICES=wide, ROOM=ROOM, BITS=ORDER_BITS[logits.dtype], num_warps=16,
    )  # fmt: skip
    return floor, last, chosen


def _widths(slices: int) -> tuple[int, int]:
    """(power of two that holds a row's slices, groups per slice)"""
    wide = triton.next_power_of_2(slices)
    return wide, max(1, GROUPS // wide)


def _sample(
    out: torch.Tensor,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed_lo: torch.Tensor,
    seed_hi: torch.Tensor,
    positions: torch.Tensor,
    mode: int,
) -> None:
    rows, vocab = logits.shape
    if not rows:
        return
    slices, filtered = triton.cdiv(vocab, BLOCK), mode == FILTERED
    wide, per_slice = _widths(slices)
    top, best = _arrays(logits, 2, rows * slices, torch.float32)
    top_id, best_id = _arrays(logits, 2, rows * slices, torch.int32)
    stride, floats, ints = logits.stride(0), temperature.stride(0), top_k.stride(0)
    # Without filters the last five are neither written nor read.
    groups, count, total, floor, last, chosen = top, *5 * (top_id,)
    if filtered:
        groups = logits.new_empty((rows, slices * per_slice), dtype=torch.float32)
        count, total = logits.new_empty((rows,), dtype=torch.int32), logits.new_empty((rows,), dtype=torch.int64)
    _max_kernel[(rows, slices)](
        logits, top, top_id, groups, count, total, stride, vocab, slices, FILTER=filtered, BLOCK=BLOCK,
        PER_SLICE=per_slice,
    )  # fmt: skip
    if filtered:
        given = (temperature, top_k, top_p, min_p, seed_lo, seed_hi, positions)
        floor, last, chosen = filter_rows(logits, *given, (top, top_id, groups), (count, total))
    if mode != GREEDY:
        _score_kernel[(rows, slices)](
            logits, top, temperature, seed_lo, seed_hi, positions, floor, last, chosen, best, best_id, floats, ints,
            positions.stride(0), stride, vocab, slices, FILTER=filtered, BLOCK=BLOCK, SLICES=wide,
        )  # fmt: skip
    _pick_kernel[(rows,)](
        out, top, top_id, best, best_id, chosen, temperature, floats, slices, RANDOM=mode != GREEDY, FILTER=filtered,
        SLICES=wide, num_warps=1,
    )  # fmt: skip


sample = library.register(
    "sample(Tensor(a!) out, Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor seed_lo, Tensor seed_hi, Tensor positions, int mode) -> ()",
    _sample,
    DEVICES,
)
"""logits (B, V) -> out (B,) int32; parameter tensors (B,), floats and ints each of one stride"""
