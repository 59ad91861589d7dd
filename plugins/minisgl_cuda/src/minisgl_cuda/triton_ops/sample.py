"""Sampling without a host sync: true argmax, Gumbel noise from (seed, position, token id), top-k, top-p and min-p.

Launches: each row's maximum over slices of the vocabulary; with filters two more, ``filter.py``, that sample most rows
with top-k outright; the best score over slices for the other rows; with filters the draws of ``nucleus.py``; then over
the slices of a row. Noise and filters are those of the core's composed ``sample``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kernels import DEVICES, library
from .filter import UNWEIGHED, WEIGHED, budget_of, finish_kernel, gather_kernel, reciprocal
from .noise import row_key
from .nucleus import decided, score_kernel, weigh_kernel

__all__ = ["sample"]

BLOCK, STEP = 4096, 1024
GREEDY, RANDOM, FILTERED = 0, 1, 2
GROUPS = 1024
"""Most groups of tokens of a row whose maxima are stored."""
ROOM = 2048
"""Tokens of a row that can be gathered. For independent logits the usual bound admits two per group."""
GATHERERS, WEIGHERS = 1024, 2048
"""Approximate number of programs that gather, and that weigh or score again; a row has at least one, at most one per
slice.
"""
MANY = 32
"""From this number of rows with top-p some will often fail two draws, and one program would take longer than a third
draw.
"""
ORDER_BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}
"""Upper bits of a float32 that values of the dtype use, rounded up to an even number."""


@triton.jit
def _max_kernel(
    logits_ptr,
    top_ptr,
    id_ptr,
    group_ptr,
    count_ptr,
    mass_ptr,
    stride,
    vocab,
    slices,
    FILTER: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_SLICE: tl.constexpr,
):
    """The largest logit and its lowest id, per (row, slice); NaN if any logit of the slice is NaN.

    FILTER: also the maxima of its groups, and zeros for the kernels that count.
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
            pair = row * 2 + tl.arange(0, 2)
            tl.store(count_ptr + pair, tl.zeros([2], tl.int32))
            tl.store(mass_ptr + pair, tl.zeros([2], tl.int64))


@triton.jit
def _pick_kernel(
    out_ptr,
    logits_ptr,
    top_ptr,
    top_id_ptr,
    temperature_ptr,
    top_p_ptr,
    seed_lo_ptr,
    seed_hi_ptr,
    positions_ptr,
    floor_ptr,
    last_ptr,
    chosen_ptr,
    mass_ptr,
    score_ptr,
    score_id_ptr,
    float_stride,
    int_stride,
    position_stride,
    stride,
    vocab,
    slices,
    RANDOM: tl.constexpr,
    FILTER: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    SLICES: tl.constexpr,
):
    """The token of each row: its sampled token if there is one, else the best of its slices or of further draws; the
    maximum if there is no distribution; -1 if any slice has a NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SLICES)
    inside = part < slices
    tops = tl.load(top_ptr + row * slices + part, mask=inside, other=float("-inf"))
    broken = tl.sum((tops != tops).to(tl.int32), axis=0) > 0
    tops = tl.where(tops != tops, 0.0, tops)
    top, at = tl.max(tops, axis=0, return_indices=True, return_indices_tie_break_left=True)
    chosen = tl.load(top_id_ptr + row * slices + at)
    if RANDOM:
        temperature = tl.load(temperature_ptr + row * float_stride)
        if (temperature > 0.0) & (not broken) & (tl.abs(top) < float("inf")):
            early = tl.full([], UNWEIGHED, tl.int32)
            if FILTER:
                early = tl.load(chosen_ptr + row)
                if early == WEIGHED:
                    key = row_key(
                        tl.load(seed_lo_ptr + row * int_stride),
                        tl.load(seed_hi_ptr + row * int_stride),
                        tl.load(positions_ptr + row * position_stride),
                    )
                    budget = budget_of(tl.load(mass_ptr + row * 2), tl.load(top_p_ptr + row * float_stride))
                    floor, last = tl.load(floor_ptr + row), tl.load(last_ptr + row)
                    early = decided(
                        logits_ptr + row * stride, top, reciprocal(temperature), key, budget, floor, last, slices,
                        vocab, BLOCK, STEP,
                    )  # fmt: skip
            if early < 0:
                score = tl.load(score_ptr + row * slices + part, mask=inside, other=float("-inf"))
                _, best = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
                early = tl.load(score_id_ptr + row * slices + best)
            chosen = early
    tl.store(out_ptr + row, tl.where(broken, -1, chosen))


def _arrays(like: torch.Tensor, number: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Allocate this many arrays of at least that size, with an alignment that does not depend on the size: Triton
    compiles for each alignment.
    """
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
    top: torch.Tensor,
    groups: torch.Tensor,
    count: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``top``, ``groups``: maxima of the slices and of their groups; ``count``: a pair per row, the first of it zero.
    Returns (whole, floor, last, chosen), int32 of at least B: before top-p rows survive down to the token whose logit
    has the order ``floor`` and whose id is ``last``, and top-p counts the mass down to the order ``whole``; a negative
    ``chosen`` says why there is no token yet.
    """
    rows, vocab = logits.shape
    slices = triton.cdiv(vocab, BLOCK)
    wide, per_slice = _widths(slices)
    maxima = triton.cdiv(vocab, BLOCK // per_slice)
    near_x = logits.new_empty((rows, ROOM), dtype=torch.float32)
    near_id = logits.new_empty((rows, ROOM), dtype=torch.int32)
    bound, whole, floor, last, chosen = _arrays(logits, 5, rows, torch.int32)
    stride, floats, ints = logits.stride(0), temperature.stride(0), top_k.stride(0)
    gather_kernel[(rows, min(slices, triton.cdiv(GATHERERS, rows)))](
        logits, top, groups, temperature, top_k, top_p, min_p, bound, count, near_x, near_id, floats, ints, stride,
        vocab, slices, maxima, maxima - maxima // 8, BLOCK=BLOCK, SLICES=wide, PER_SLICE=per_slice,
        GROUPS=triton.next_power_of_2(maxima), ROOM=ROOM, num_warps=8,
    )  # fmt: skip
    finish_kernel[(rows,)](
        logits, top, temperature, top_k, top_p, min_p, seed_lo, seed_hi, positions, bound, count, near_x, near_id,
        whole, floor, last, chosen, floats, ints, positions.stride(0), stride, vocab, slices, BLOCK=BLOCK, SLICES=wide,
        ROOM=ROOM, BITS=ORDER_BITS[logits.dtype], num_warps=16,
    )  # fmt: skip
    return whole, floor, last, chosen


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
    stride, floats, ints, places = logits.stride(0), temperature.stride(0), top_k.stride(0), positions.stride(0)
    # Without filters these are neither written nor read.
    groups, count, mass, limits = top, top_id, top_id, 4 * (top_id,)
    if filtered:
        groups = logits.new_empty((rows, slices * per_slice), dtype=torch.float32)
        # Per row: tokens gathered and parts that weighed; the mass of all and before the best token.
        count, mass = logits.new_empty((rows, 2), dtype=torch.int32), logits.new_empty((rows, 2), dtype=torch.int64)
    _max_kernel[(rows, slices)](
        logits, top, top_id, groups, count, mass, stride, vocab, slices, FILTER=filtered, BLOCK=BLOCK,
        PER_SLICE=per_slice,
    )  # fmt: skip
    noise = (seed_lo, seed_hi, positions)
    if filtered:
        limits = filter_rows(logits, temperature, top_k, top_p, min_p, *noise, top, groups, count)
    whole, *rest = limits
    shared = min(slices, triton.cdiv(WEIGHERS, rows))
    for draw in range(_draws(rows, mode)):
        score_kernel[(rows, shared if draw else slices)](
            logits, top, temperature, *noise, whole, *rest, mass, best, best_id, floats, ints, places, stride, vocab,
            slices, FILTER=filtered, AGAIN=draw > 0, BLOCK=BLOCK, STEP=STEP,
            SLICES=wide,
        )  # fmt: skip
        if filtered:
            weigh_kernel[(rows, shared)](
                logits, top, temperature, top_p, *rest, count, mass, best, best_id, floats, stride, vocab, slices,
                BLOCK=BLOCK, SLICES=wide, num_warps=8,
            )  # fmt: skip
    _pick_kernel[(rows,)](
        out, logits, top, top_id, temperature, top_p, *noise, *rest, mass, best, best_id, floats, ints, places, stride,
        vocab, slices, RANDOM=mode != GREEDY, FILTER=filtered, BLOCK=BLOCK, STEP=STEP,
        SLICES=wide, num_warps=8 if filtered else 1,
    )  # fmt: skip


def _draws(rows: int, mode: int) -> int:
    """Number of draws that many programs share. One program makes further draws, which few rows need."""
    if mode != FILTERED:
        return int(mode == RANDOM)
    return 2 if rows < MANY else 3


sample = library.register(
    "sample(Tensor(a!) out, Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor seed_lo, Tensor seed_hi, Tensor positions, int mode) -> ()",
    _sample,
    DEVICES,
)
"""logits (B, V) -> out (B,) int32; parameter tensors (B,), floats and ints each of one stride"""
