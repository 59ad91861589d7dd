"""Top-k, top-p of its survivors and min-p, exact, in about two passes over the vocabulary for all but unusual rows.

What a filter keeps is a row's first tokens in one order: larger logits first, among equals lower ids first. So a row
needs only its last survivor: a logit and an id. ``gather_kernel`` copies out the tokens above a bound that leaves few,
found from the maxima of groups of tokens: at least k tokens lie at or above the k-th largest of these maxima.
``finish_kernel`` filters and samples among them in one program. Where they do not hold all survivors (a top-k of many
hundreds, thousands of equal logits, a low min-p) it finds the floor that top-k and min-p set and leaves the rest, and
top-p without top-k from the start, to ``nucleus.py``.

Probabilities are summed as integers, multiples of 2**-40 of the largest one. So sums do not depend on their order,
which varies as programs arrive, nor on the number of programs. They hold the sum of 2**22 tokens, and no row has more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .noise import gumbel, row_key

__all__ = [
    "HIGHEST",
    "LOWEST",
    "UNWEIGHED",
    "WEIGHED",
    "budget_of",
    "finish_kernel",
    "gather_kernel",
    "ordered",
    "reciprocal",
    "row_top",
    "weight_of",
]

UNWEIGHED: tl.constexpr = tl.constexpr(-1)
WEIGHED: tl.constexpr = tl.constexpr(-2)
"""Codes in place of a token: it has still to be chosen among the survivors, or among those that top-p leaves."""
LOWEST: tl.constexpr = tl.constexpr(-2147483648)
HIGHEST: tl.constexpr = tl.constexpr(2147483647)
_MASKED: tl.constexpr = tl.constexpr(-2139095041)
"""The order of minus infinity."""


@triton.jit
def ordered(x):
    """float32 -> int32 that sorts alike; -0.0 sorts as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unsigned(order):
    """An order (int32) as uint32 that sorts alike, of which thresholds are built from the highest bit down."""
    return order.to(tl.uint32, bitcast=True) ^ tl.full([], 0x80000000, tl.uint32)


@triton.jit
def _order_from(found, BITS: tl.constexpr):
    """The lowest order whose upper BITS bits equal those of ``found``, among the values of 16-bit floats."""
    low: tl.constexpr = 2 ** (32 - BITS) - 1
    order = (found ^ tl.full([], 0x80000000, tl.uint32)).to(tl.int32, bitcast=True)
    return tl.where(order < 0, order | low, order)


@triton.jit
def reciprocal(temperature):
    """1 / temperature, but finite, so that the maximum's distance from itself stays zero."""
    return tl.minimum(1.0 / temperature, 3.4028234663852886e38)


@triton.jit
def weight_of(x, top, inverse):
    """exp((x - top) * inverse) in units of 2**-40, int64"""
    return (tl.exp((x - top) * inverse) * 1099511627776.0).to(tl.int64)


@triton.jit
def budget_of(mass, p):
    """The mass of stronger tokens that excludes a token; always enough to keep the strongest token."""
    return tl.maximum(tl.ceil(mass.to(tl.float64) * p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def row_top(top_ptr, row, slices, SLICES: tl.constexpr):
    """(maximum, True if it is finite and can be divided and compared)"""
    part = tl.arange(0, SLICES)
    tops = tl.load(top_ptr + row * slices + part, mask=part < slices, other=float("-inf"))
    top = tl.max(tops, axis=0)
    sound = (tl.sum((tops != tops).to(tl.int32), axis=0) == 0) & (tl.abs(top) < float("inf"))
    return top, sound


@triton.jit
def _kth(order, inside, k, BITS: tl.constexpr):
    """The k-th largest order, from the highest bit down; of its lower bits, zeros."""
    order = _unsigned(order)
    found = tl.full([], 0, tl.uint32)
    for bit in range(BITS):
        candidate = found | (tl.full([], 1, tl.uint32) << (31 - bit))
        count = tl.sum((inside & (order >= candidate)).to(tl.int32), axis=0)
        found = tl.where(count >= k, candidate, found)
    return found


@triton.jit
def _nucleus(order, weight, budget, BITS: tl.constexpr):
    """The largest order from which up the weights reach the budget."""
    order = _unsigned(order)
    found = tl.full([], 0, tl.uint32)
    for bit in range(BITS):
        candidate = found | (tl.full([], 1, tl.uint32) << (31 - bit))
        mass = tl.sum(tl.where(order >= candidate, weight, 0), axis=0)
        found = tl.where(mass >= budget, candidate, found)
    return found


@triton.jit
def _least(top, temperature, min_p):
    """The order of the lowest logit that min-p keeps; it keeps the maximum."""
    return tl.minimum(ordered(top + temperature * tl.log(min_p)), ordered(top))


@triton.jit
def gather_kernel(
    logits_ptr,
    top_ptr,
    group_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    bound_ptr,
    count_ptr,
    near_x_ptr,
    near_id_ptr,
    float_stride,
    int_stride,
    stride,
    vocab,
    slices,
    groups,
    reach,
    BLOCK: tl.constexpr,
    SLICES: tl.constexpr,
    PER_SLICE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Gather the tokens at or above a row's bound, in any order, per (row, part) of rows with top-k, or min-p without
    top-p.

    The bound is at most the maximum of ``reach`` groups, counted from the largest.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row * float_stride)
    k = tl.load(top_k_ptr + row * int_stride)
    p = tl.load(top_p_ptr + row * float_stride)
    min_p = tl.load(min_p_ptr + row * float_stride)
    by_k, by_p = (k > 0) & (k < vocab), p < 1.0
    top, sound = row_top(top_ptr, row, slices, SLICES)
    if (temperature > 0.0) & sound & (by_k | ((min_p > 0.0) & (not by_p))):
        bound = tl.full([], LOWEST, tl.int32)
        if (vocab > ROOM) & by_k:
            group = tl.arange(0, GROUPS)
            high = tl.load(group_ptr + row * slices * PER_SLICE + group, mask=group < groups, other=float("-inf"))
            # A coarse bound is enough: it admits only a few more tokens.
            found = _kth(ordered(high), group < groups, tl.minimum(k, reach), 16)
            bound = _order_from(found, 32)
        # All tokens of top-k are needed if top-p takes its share of their mass.
        if (min_p > 0.0) & (not by_p):
            bound = tl.maximum(bound, _least(top, temperature, min_p))
        if part == 0:
            tl.store(bound_ptr + row, bound)
        for block in range(part, slices, tl.num_programs(1)):
            token = block * BLOCK + tl.arange(0, BLOCK)
            inside = token < vocab
            x = tl.load(logits_ptr + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
            take = inside & (ordered(x) >= bound) & (x > float("-inf"))  # masked tokens have no probability
            taken = tl.sum(take.to(tl.int32), axis=0)
            if taken > 0:
                at = tl.atomic_add(count_ptr + row * 2, taken, sem="relaxed")
                at += tl.cumsum(take.to(tl.int32), axis=0) - 1
                here = take & (at < ROOM)
                tl.store(near_x_ptr + row * ROOM + at, x, mask=here)
                tl.store(near_id_ptr + row * ROOM + at, token, mask=here)


@triton.jit
def _met(low, medium, high, wanted):
    """Number of three decreasing sums that reach the target: a digit to base four."""
    return (low >= wanted).to(tl.uint32) + (medium >= wanted).to(tl.uint32) + (high >= wanted).to(tl.uint32)


@triton.jit
def _kth_of_row(base, k, vocab, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """The k-th largest order among all tokens of a row, two bits per pass; of its lower bits, zeros."""
    lane = tl.arange(0, BLOCK)
    one = tl.full([], 1, tl.uint32)
    found = tl.full([], 0, tl.uint32)
    for pair in range(BITS // 2):
        step = one << (30 - 2 * pair)
        low = tl.zeros([BLOCK], tl.int32)
        medium = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab, BLOCK):
            inside = start + lane < vocab
            x = tl.load(base + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
            order = _unsigned(ordered(x))
            low += (inside & (order >= found + step)).to(tl.int32)
            medium += (inside & (order >= found + 2 * step)).to(tl.int32)
            high += (inside & (order >= found + 3 * step)).to(tl.int32)
        found += step * _met(tl.sum(low, axis=0), tl.sum(medium, axis=0), tl.sum(high, axis=0), k)
    return found


@triton.jit
def _last_equal(equal, token, number):
    """The id of the ``number``-th of the equal tokens, by increasing id; they may be in any order."""
    found = tl.full([], 0, tl.int32)
    for bit in range(31):
        candidate = found | (tl.full([], 1, tl.int32) << (30 - bit))
        below = tl.sum((equal & (token < candidate)).to(tl.int32), axis=0)
        found = tl.where(below < number, candidate, found)
    return found


@triton.jit
def finish_kernel(
    logits_ptr,
    top_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_lo_ptr,
    seed_hi_ptr,
    positions_ptr,
    bound_ptr,
    count_ptr,
    near_x_ptr,
    near_id_ptr,
    whole_ptr,
    floor_ptr,
    last_ptr,
    chosen_ptr,
    float_stride,
    int_stride,
    position_stride,
    stride,
    vocab,
    slices,
    BLOCK: tl.constexpr,
    SLICES: tl.constexpr,
    ROOM: tl.constexpr,
    BITS: tl.constexpr,
):
    """Filter and sample among the gathered tokens, per row with a temperature.

    Writes the token if the gathered ones decide it, and the last survivor, as the order of its logit and its id.
    Otherwise writes the state before top-p, why there is no token yet, and the order down to which top-p counts the
    mass. BITS: the number of upper bits of its order that a logit can have, 32 for float32.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * float_stride)
    k = tl.load(top_k_ptr + row * int_stride)
    p = tl.load(top_p_ptr + row * float_stride)
    min_p = tl.load(min_p_ptr + row * float_stride)
    by_k, by_p = (k > 0) & (k < vocab), p < 1.0
    top, sound = row_top(top_ptr, row, slices, SLICES)
    floor = tl.full([], LOWEST, tl.int32)
    last = tl.full([], HIGHEST, tl.int32)
    chosen = tl.full([], UNWEIGHED, tl.int32)
    if (temperature > 0.0) & sound & (by_k | by_p | (min_p > 0.0)):
        inverse = reciprocal(temperature)
        least = tl.full([], LOWEST, tl.int32)
        if min_p > 0.0:
            least = _least(top, temperature, min_p)
        enough = tl.full([], 0, tl.int1)
        count = tl.full([], 0, tl.int32)
        if by_k | (not by_p):
            bound, count = tl.load(bound_ptr + row), tl.load(count_ptr + row * 2)
            # Tokens that were not gathered have no probability, or are dropped by min-p, which set the bound.
            closed = (bound <= _MASKED) | ((bound == least) & (not by_p))
            enough = (count <= ROOM) & (closed | (count >= k))
            if enough:
                lane = tl.arange(0, ROOM)
                held = lane < count
                x = tl.load(near_x_ptr + row * ROOM + lane, mask=held, other=float("-inf"))
                token = tl.load(near_id_ptr + row * ROOM + lane, mask=held, other=0)
                order = ordered(x)
                floor = bound
                if by_k & (count >= k):
                    floor = tl.maximum(floor, _order_from(_kth(order, held, k, BITS), BITS))
                if by_p:
                    weight = tl.where(held & (order >= floor), weight_of(x, top, inverse), 0)
                    budget = budget_of(tl.sum(weight, axis=0), p)
                    floor = _order_from(_nucleus(order, weight, budget, BITS), BITS)
                    equal = held & (order == floor)
                    left = budget - tl.sum(tl.where(order > floor, weight, 0), axis=0)
                    # Equal tokens have equal mass: this many of them, lower ids first, reach the budget.
                    number = tl.cdiv(left, tl.max(tl.where(equal, weight, 0), axis=0)).to(tl.int32)
                    if number < tl.sum(equal.to(tl.int32), axis=0):
                        last = _last_equal(equal, token, number)
            elif by_k:
                floor = _order_from(_kth_of_row(logits_ptr + row * stride, k, vocab, BLOCK, BITS), BITS)
        tl.store(whole_ptr + row, floor)
        if least > floor:
            floor = least
            last = tl.full([], HIGHEST, tl.int32)
        if enough:
            lane = tl.arange(0, ROOM)
            held = lane < count
            x = tl.load(near_x_ptr + row * ROOM + lane, mask=held, other=float("-inf"))
            token = tl.load(near_id_ptr + row * ROOM + lane, mask=held, other=0)
            order = ordered(x)
            key = row_key(
                tl.load(seed_lo_ptr + row * int_stride),
                tl.load(seed_hi_ptr + row * int_stride),
                tl.load(positions_ptr + row * position_stride),
            )
            keep = held & ((order > floor) | ((order == floor) & (token <= last)))
            score = tl.where(keep, (x - top) * inverse + gumbel(key, token), float("-inf"))
            best = tl.max(score, axis=0)
            chosen = tl.min(tl.where(keep & (score == best), token, HIGHEST), axis=0)
        elif by_p:
            chosen = tl.full([], WEIGHED, tl.int32)
    tl.store(floor_ptr + row, floor)
    tl.store(last_ptr + row, last)
    tl.store(chosen_ptr + row, chosen)
