"""Sampling without a host sync: true argmax, Gumbel noise from (seed, position, token id), top-k, top-p and min-p.

Three launches: each row's maximum over slices of the vocabulary; for filtered rows the smallest surviving logit; the
best score over slices, then over the slices of a row. Noise and filters are those of the core's composed ``sample``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kernels import DEVICES, library

__all__ = ["sample"]

BLOCK = 4096
GREEDY, RANDOM, FILTERED = 0, 1, 2


@triton.jit
def _fmix(h):
    h = h ^ (h >> 16)
    h = h * tl.full([], 0x85EBCA6B, tl.uint32)
    h = h ^ (h >> 13)
    h = h * tl.full([], 0xC2B2AE35, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def _row_key(seed_lo, seed_hi, position):
    low = seed_lo.to(tl.uint32, bitcast=True)
    high = seed_hi.to(tl.uint32, bitcast=True)
    where = position.to(tl.uint32, bitcast=True)
    key = _fmix(low ^ _fmix(high + tl.full([], 0x9E3779B9, tl.uint32)))
    return _fmix(key ^ _fmix(where + tl.full([], 0x7F4A7C15, tl.uint32)))


@triton.jit
def _gumbel(key, token):
    h = _fmix((token.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32)) ^ key)
    h = _fmix(h + key)
    u = tl.minimum((h.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    # -log1p(-u) to full relative precision where u is small, which is the end that decides.
    small = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * 0.2))))
    exact = -tl.log(1.0 - u)
    return -tl.log(tl.where(u < 0.01, small, exact))


@triton.jit
def _ordered(x):
    """float32 -> int32 that sorts alike; -0.0 sorts as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _max_kernel(logits_ptr, top_ptr, id_ptr, stride, vocab, slices, BLOCK: tl.constexpr):
    """Per (row, slice): the largest logit and its lowest id; NaN if any logit of the slice is NaN."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    broken = tl.sum((x != x).to(tl.int32), axis=0) > 0
    top, at = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(top_ptr + row * slices + part, tl.where(broken, float("nan"), top))
    tl.store(id_ptr + row * slices + part, part * BLOCK + at)


@triton.jit
def _threshold_kernel(
    logits_ptr,
    top_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    floor_ptr,
    last_ptr,
    float_stride,
    int_stride,
    stride,
    vocab,
    slices,
    BLOCK: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Per row: the order of the smallest surviving logit, and the highest id that survives among its equals."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * float_stride)
    k = tl.load(top_k_ptr + row * int_stride)
    p = tl.load(top_p_ptr + row * float_stride)
    min_p = tl.load(min_p_ptr + row * float_stride)
    part = tl.arange(0, SLICES)
    top = tl.max(tl.load(top_ptr + row * slices + part, mask=part < slices, other=float("-inf")), axis=0)
    floor = tl.full([], -2147483648, tl.int32)
    last = tl.full([], 2147483647, tl.int32)
    if temperature > 0.0:
        base = logits_ptr + row * stride
        lane = tl.arange(0, BLOCK)
        # top-k: the k-th largest logit, one bit of its order at a time, from the sign down.
        if (k > 0) & (k < vocab):
            found = tl.full([], 0, tl.int64)
            for bit in range(32):
                trial = found + (tl.full([], 1, tl.int64) << (31 - bit))
                count = tl.zeros([BLOCK], tl.int32)
                for start in range(0, vocab, BLOCK):
                    token = start + lane
                    x = tl.load(base + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
                    order = _ordered(x).to(tl.int64) + 2147483648
                    count += ((order >= trial) & (token < vocab)).to(tl.int32)
                found = tl.where(tl.sum(count, axis=0) >= k, trial, found)
            floor = (found - 2147483648).to(tl.int32)
        # top-p: the smallest order whose strictly larger logits hold less than p of what top-k kept.
        if p < 1.0:
            mass = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocab, BLOCK):
                token = start + lane
                x = tl.load(base + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
                mass += tl.where(_ordered(x) >= floor, tl.exp((x - top) / temperature), 0.0)
            budget = tl.sum(mass, axis=0) * p
            found = tl.full([], 0, tl.int64)
            for bit in range(32):
                trial = found + (tl.full([], 1, tl.int64) << (31 - bit))
                # With everything from ``trial`` up already over budget, the threshold is at least ``trial``.
                mass = tl.zeros([BLOCK], tl.float32)
                for start in range(0, vocab, BLOCK):
                    token = start + lane
                    x = tl.load(base + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
                    order = _ordered(x).to(tl.int64) + 2147483648
                    mass += tl.where(order >= trial, tl.exp((x - top) / temperature), 0.0)
                found = tl.where(tl.sum(mass, axis=0) >= budget, trial, found)
            nucleus = (found - 2147483648).to(tl.int32)
            if nucleus > floor:
                floor = nucleus
            # Among equals at the threshold the lower ids come first, until the budget is met.
            above = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocab, BLOCK):
                token = start + lane
                x = tl.load(base + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
                above += tl.where(_ordered(x) > floor, tl.exp((x - top) / temperature), 0.0)
            left = budget - tl.sum(above, axis=0)
            last = tl.full([], -1, tl.int32)
            for start in range(0, vocab, BLOCK):
                token = start + lane
                x = tl.load(base + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
                equal = (_ordered(x) == floor) & (token < vocab)
                share = tl.where(equal, tl.exp((x - top) / temperature), 0.0)
                before = tl.cumsum(share, axis=0) - share
                taken = tl.where(equal & (before < left), token, -1)
                last = tl.maximum(last, tl.max(taken, axis=0))
                left -= tl.sum(share, axis=0)
        if min_p > 0.0:
            least = _ordered(top + temperature * tl.log(min_p))
            if least > floor:
                floor = least
                last = tl.full([], 2147483647, tl.int32)
    tl.store(floor_ptr + row, floor)
    tl.store(last_ptr + row, last)


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
    """Per (row, slice) of rows with a temperature: the best noisy score and its lowest id."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row * float_stride)
    if temperature > 0.0:
        others = tl.arange(0, SLICES)
        top = tl.max(tl.load(top_ptr + row * slices + others, mask=others < slices, other=float("-inf")), axis=0)
        token = part * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        x = tl.load(logits_ptr + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
        key = _row_key(
            tl.load(seed_lo_ptr + row * int_stride),
            tl.load(seed_hi_ptr + row * int_stride),
            tl.load(positions_ptr + row * position_stride),
        )
        score = (x - top) / temperature + _gumbel(key, token)
        keep = inside
        if FILTER:
            order, floor = _ordered(x), tl.load(floor_ptr + row)
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
    temperature_ptr,
    float_stride,
    slices,
    RANDOM: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Per row: the winner of its slices; -1 if any slice holds a NaN."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SLICES)
    inside = part < slices
    top = tl.load(top_ptr + row * slices + part, mask=inside, other=float("-inf"))
    broken = tl.sum((top != top).to(tl.int32), axis=0) > 0
    _, at = tl.max(top, axis=0, return_indices=True, return_indices_tie_break_left=True)
    chosen = tl.load(top_id_ptr + row * slices + at)
    if RANDOM:  # noqa: SIM102 - one is decided at compile time
        if tl.load(temperature_ptr + row * float_stride) > 0.0:
            score = tl.load(score_ptr + row * slices + part, mask=inside, other=float("-inf"))
            _, best = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
            chosen = tl.load(score_id_ptr + row * slices + best)
    tl.store(out_ptr + row, tl.where(broken, -1, chosen))


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
    slices = triton.cdiv(vocab, BLOCK)
    wide = triton.next_power_of_2(slices)
    top = logits.new_empty((2, rows, slices), dtype=torch.float32)
    ids = logits.new_empty((2, rows, slices), dtype=torch.int32)
    stride, floats, ints = logits.stride(0), temperature.stride(0), top_k.stride(0)
    _max_kernel[(rows, slices)](logits, top[0], ids[0], stride, vocab, slices, BLOCK=BLOCK)
    if mode != GREEDY:
        limits = logits.new_empty((2, rows), dtype=torch.int32)
        if mode == FILTERED:
            _threshold_kernel[(rows,)](
                logits, top[0], temperature, top_k, top_p, min_p, limits[0], limits[1], floats, ints, stride, vocab,
                slices, BLOCK=BLOCK, SLICES=wide, num_warps=16,
            )  # fmt: skip
        _score_kernel[(rows, slices)](
            logits, top[0], temperature, seed_lo, seed_hi, positions, limits[0], limits[1], top[1], ids[1], floats,
            ints, positions.stride(0), stride, vocab, slices, FILTER=mode == FILTERED, BLOCK=BLOCK, SLICES=wide,
        )  # fmt: skip
    _pick_kernel[(rows,)](
        out, top[0], ids[0], top[1], ids[1], temperature, floats, slices, RANDOM=mode != GREEDY, SLICES=wide,
        num_warps=1,
    )  # fmt: skip


sample = library.register(
    "sample(Tensor(a!) out, Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor seed_lo, Tensor seed_hi, Tensor positions, int mode) -> ()",
    _sample,
    DEVICES,
)
"""logits (B, V) -> out (B,) int32; parameter tensors (B,), floats and ints each of one stride"""
