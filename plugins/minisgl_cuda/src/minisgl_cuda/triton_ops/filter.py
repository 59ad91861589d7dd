"""Top-k, top-p and min-p, exact, in about two passes over the vocabulary for all but unusual rows.

What a filter keeps is a row's first tokens in one order: larger logits first, among equals lower ids first. So a row
needs only its last survivor: a logit and an id. ``gather_kernel`` copies out the tokens above a bound that leaves few,
found from the maxima of groups of tokens: at least k tokens lie at or above the k-th largest of these maxima.
``finish_kernel`` filters and samples among them in one program. Where they do not hold all survivors (top-p of a flat
distribution, a top-k of many hundreds, thousands of equal logits) that program searches the row itself.

Probabilities are summed as integers, multiples of 2**-40 of the largest one. So sums do not depend on their order,
which varies as programs arrive, nor on the number of programs. They hold the sum of 2**22 tokens, and no row has more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .noise import gumbel, row_key

__all__ = ["finish_kernel", "gather_kernel", "ordered"]

_LOWEST: tl.constexpr = tl.constexpr(-2147483648)
_HIGHEST: tl.constexpr = tl.constexpr(2147483647)
_MASKED: tl.constexpr = tl.constexpr(-2139095041)
"""The order of minus infinity"""


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
    """The lowest order whose upper BITS bits are those of ``found``, of the values that 16-bit floats can have."""
    low: tl.constexpr = 2 ** (32 - BITS) - 1
    order = (found ^ tl.full([], 0x80000000, tl.uint32)).to(tl.int32, bitcast=True)
    return tl.where(order < 0, order | low, order)


@triton.jit
def _weight(x, top, temperature):
    """exp((x - top) / temperature) in units of 2**-40, int64"""
    return (tl.exp((x - top) / temperature) * 1099511627776.0).to(tl.int64)


@triton.jit
def _budget(mass, p):
    """The mass that stronger tokens must hold to exclude a token: never so little that it excludes the strongest."""
    return tl.maximum(tl.ceil(mass.to(tl.float64) * p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _row_top(top_ptr, row, slices, SLICES: tl.constexpr):
    """(maximum, may it be divided and compared: neither NaN nor infinite)"""
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
        trial = found | (tl.full([], 1, tl.uint32) << (31 - bit))
        count = tl.sum((inside & (order >= trial)).to(tl.int32), axis=0)
        found = tl.where(count >= k, trial, found)
    return found


@triton.jit
def _nucleus(order, weight, budget, BITS: tl.constexpr):
    """The largest order from which up the weights reach the budget."""
    order = _unsigned(order)
    found = tl.full([], 0, tl.uint32)
    for bit in range(BITS):
        trial = found | (tl.full([], 1, tl.uint32) << (31 - bit))
        mass = tl.sum(tl.where(order >= trial, weight, 0), axis=0)
        found = tl.where(mass >= budget, trial, found)
    return found


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
    total_ptr,
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
    """Per (row, part) of rows with filters: the tokens at or above the row's bound, in any order; for a top-p of all
    tokens also the mass of all. ``reach``: which of the group maxima is the bound where top-k does not say.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row * float_stride)
    k = tl.load(top_k_ptr + row * int_stride)
    p = tl.load(top_p_ptr + row * float_stride)
    min_p = tl.load(min_p_ptr + row * float_stride)
    by_k, by_p = (k > 0) & (k < vocab), p < 1.0
    top, sound = _row_top(top_ptr, row, slices, SLICES)
    if (temperature > 0.0) & sound & (by_k | by_p | (min_p > 0.0)):
        bound = tl.full([], _LOWEST, tl.int32)
        if (vocab > ROOM) & (by_k | by_p):
            group = tl.arange(0, GROUPS)
            high = tl.load(group_ptr + row * slices * PER_SLICE + group, mask=group < groups, other=float("-inf"))
            # A coarse bound will do: it only lets a few more tokens in.
            found = _kth(ordered(high), group < groups, tl.where(by_k, tl.minimum(k, reach), reach), 16)
            bound = _order_from(found, 32)
        # The rest of top-k must all be seen where top-p takes its share of it.
        if (min_p > 0.0) & ((not by_k) | (not by_p)):
            bound = tl.maximum(bound, ordered(top + temperature * tl.log(min_p)))
        if part == 0:
            tl.store(bound_ptr + row, bound)
        mass = tl.zeros([BLOCK], tl.int64)
        for block in range(part, slices, tl.num_programs(1)):
            token = block * BLOCK + tl.arange(0, BLOCK)
            inside = token < vocab
            x = tl.load(logits_ptr + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
            take = inside & (ordered(x) >= bound) & (x > float("-inf"))  # masked tokens have no probability
            taken = tl.sum(take.to(tl.int32), axis=0)
            if taken > 0:
                at = tl.atomic_add(count_ptr + row, taken, sem="relaxed")
                at += tl.cumsum(take.to(tl.int32), axis=0) - 1
                here = take & (at < ROOM)
                tl.store(near_x_ptr + row * ROOM + at, x, mask=here)
                tl.store(near_id_ptr + row * ROOM + at, token, mask=here)
            if by_p & (not by_k):
                mass += _weight(x, top, temperature)
        if by_p & (not by_k):
            tl.atomic_add(total_ptr + row, tl.sum(mass, axis=0), sem="relaxed")


@triton.jit
def _met(low, medium, high, wanted):
    """How many of three sums, falling, reach what is wanted: a digit to base four."""
    return (low >= wanted).to(tl.uint32) + (medium >= wanted).to(tl.uint32) + (high >= wanted).to(tl.uint32)


@triton.jit
def _search(base, top, temperature, k, p, total, by_k, by_p, vocab, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """The last survivor of top-k and top-p, (order, id), among all tokens of a row: two bits per pass."""
    lane = tl.arange(0, BLOCK)
    floor = tl.full([], _LOWEST, tl.int32)
    last = tl.full([], _HIGHEST, tl.int32)
    one = tl.full([], 1, tl.uint32)
    if by_k:
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
        floor = _order_from(found, BITS)
    if by_p:
        if by_k:
            mass = tl.zeros([BLOCK], tl.int64)
            for start in range(0, vocab, BLOCK):
                x = tl.load(base + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
                mass += tl.where(ordered(x) >= floor, _weight(x, top, temperature), 0)
            total = tl.sum(mass, axis=0)
        budget = _budget(total, p)
        found = tl.full([], 0, tl.uint32)
        for pair in range(BITS // 2):
            step = one << (30 - 2 * pair)
            low = tl.zeros([BLOCK], tl.int64)
            medium = tl.zeros([BLOCK], tl.int64)
            high = tl.zeros([BLOCK], tl.int64)
            for start in range(0, vocab, BLOCK):
                x = tl.load(base + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
                order, weight = _unsigned(ordered(x)), _weight(x, top, temperature)
                low += tl.where(order >= found + step, weight, 0)
                medium += tl.where(order >= found + 2 * step, weight, 0)
                high += tl.where(order >= found + 3 * step, weight, 0)
            found += step * _met(tl.sum(low, axis=0), tl.sum(medium, axis=0), tl.sum(high, axis=0), budget)
        floor = _order_from(found, BITS)
        mass = tl.zeros([BLOCK], tl.int64)
        share = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab, BLOCK):
            x = tl.load(base + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
            order, weight = ordered(x), _weight(x, top, temperature)
            mass += tl.where(order > floor, weight, 0)
            share = tl.maximum(share, tl.where(order == floor, weight, 0))
        # Equals weigh the same: so many of them, lower ids first, until the budget is met.
        left = tl.cdiv(budget - tl.sum(mass, axis=0), tl.max(share, axis=0)).to(tl.int32)
        last = tl.full([], -1, tl.int32)
        for start in range(0, vocab, BLOCK):
            x = tl.load(base + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
            equal = (ordered(x) == floor).to(tl.int32)
            among = (equal > 0) & (tl.cumsum(equal, axis=0) <= left)
            last = tl.maximum(last, tl.max(tl.where(among, start + lane, -1), axis=0))
            left -= tl.sum(equal, axis=0)
    return floor, last


@triton.jit
def _last_equal(equal, token, number):
    """The id of the ``number``-th of the equal tokens, lowest first, which may stand in any order."""
    found = tl.full([], 0, tl.int32)
    for bit in range(31):
        trial = found | (tl.full([], 1, tl.int32) << (30 - bit))
        below = tl.sum((equal & (token < trial)).to(tl.int32), axis=0)
        found = tl.where(below < number, trial, found)
    return found


@triton.jit
def finish_kernel(
    logits_ptr,
    top_ptr,
    top_id_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_lo_ptr,
    seed_hi_ptr,
    positions_ptr,
    bound_ptr,
    count_ptr,
    total_ptr,
    near_x_ptr,
    near_id_ptr,
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
    """Per row with a temperature: the token, where the gathered ones tell; else -1 and the last survivor, as the order
    of its logit and its id. BITS: how many upper bits of its order a logit can have, 32 for float32.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * float_stride)
    k = tl.load(top_k_ptr + row * int_stride)
    p = tl.load(top_p_ptr + row * float_stride)
    min_p = tl.load(min_p_ptr + row * float_stride)
    by_k, by_p = (k > 0) & (k < vocab), p < 1.0
    top, sound = _row_top(top_ptr, row, slices, SLICES)
    floor = tl.full([], _LOWEST, tl.int32)
    last = tl.full([], _HIGHEST, tl.int32)
    chosen = tl.full([], -1, tl.int32)
    if temperature > 0.0:
        if not sound:
            # No distribution: the maximum, or for a NaN what the last kernel says.
            part = tl.arange(0, SLICES)
            tops = tl.load(top_ptr + row * slices + part, mask=part < slices, other=float("-inf"))
            first = tl.min(tl.where((tops == top) & (part < slices), part, SLICES), axis=0)
            chosen = tl.load(top_id_ptr + row * slices + tl.minimum(first, slices - 1))
        elif by_k | by_p | (min_p > 0.0):
            bound, count = tl.load(bound_ptr + row), tl.load(count_ptr + row)
            total = tl.load(total_ptr + row)
            least = tl.full([], _LOWEST, tl.int32)
            if min_p > 0.0:
                least = ordered(top + temperature * tl.log(min_p))
            # What was not gathered has no probability, or min-p, which set the bound, drops it.
            closed = (bound <= _MASKED) | ((bound == least) & ((not by_k) | (not by_p)))
            enough = count <= ROOM
            if enough:
                lane = tl.arange(0, ROOM)
                held = lane < count
                x = tl.load(near_x_ptr + row * ROOM + lane, mask=held, other=float("-inf"))
                token = tl.load(near_id_ptr + row * ROOM + lane, mask=held, other=0)
                order = ordered(x)
                floor = bound
                if by_k:
                    if count >= k:
                        floor = tl.maximum(floor, _order_from(_kth(order, held, k, BITS), BITS))
                    enough = closed | (count >= k)
                if by_p & enough:
                    weight = tl.where(held & (order >= floor), _weight(x, top, temperature), 0)
                    mass = tl.sum(weight, axis=0)
                    if by_k:
                        total = mass
                    budget = _budget(total, p)
                    if mass >= budget:
                        floor = _order_from(_nucleus(order, weight, budget, BITS), BITS)
                        equal = held & (order == floor)
                        left = budget - tl.sum(tl.where(order > floor, weight, 0), axis=0)
                        # Equals weigh the same: so many of them, lower ids first, until the budget is met.
                        number = tl.cdiv(left, tl.max(tl.where(equal, weight, 0), axis=0)).to(tl.int32)
                        if number < tl.sum(equal.to(tl.int32), axis=0):
                            last = _last_equal(equal, token, number)
                    else:
                        enough = closed
            if not enough:
                base = logits_ptr + row * stride
                floor, last = _search(base, top, temperature, k, p, total, by_k, by_p, vocab, BLOCK, BITS)
            if least > floor:
                floor = least
                last = tl.full([], _HIGHEST, tl.int32)
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
                score = tl.where(keep, (x - top) / temperature + gumbel(key, token), float("-inf"))
                best = tl.max(score, axis=0)
                chosen = tl.min(tl.where(keep & (score == best), token, _HIGHEST), axis=0)
    tl.store(floor_ptr + row, floor)
    tl.store(last_ptr + row, last)
    tl.store(chosen_ptr + row, chosen)
