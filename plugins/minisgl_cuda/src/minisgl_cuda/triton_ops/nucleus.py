"""The best noisy score among a row's survivors, and top-p by repeated draws, without a sort or a search.

Survivors of top-p are a row's first tokens in one order: larger logits first, among equals lower ids first. The best
token of all, noise included, is the answer if it is one of them, which it is when the tokens before it hold less than
the share p. If it is not, all survivors come before it: the best of those is tried next. So each draw takes two
passes that any number of programs can share: the scores, and the mass before the best of them.

Where the mass is spread thin, n draws fail as often as a Poisson variable of mean log(1 / p) is n or more: for 0.95
one fails 5 times in 100, two do once in 800, three once in 50,000. Where single tokens hold much of it they fail less.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .filter import HIGHEST, LOWEST, UNWEIGHED, WEIGHED, budget_of, ordered, reciprocal, row_top, weight_of
from .noise import gumbel, gumbel_bound, row_key

__all__ = ["decided", "score_kernel", "weigh_kernel"]

_LEAST: tl.constexpr = tl.constexpr(-3.0)
"""Lower bound of the noise, so that a row's strongest token always has a higher score."""
_FAR: tl.constexpr = tl.constexpr(-28.0)
"""At this distance below the maximum, divided by the temperature, a logit has no mass, and noise (at most 22.9) cannot
lift it.
"""


@triton.jit
def _survives(order, token, floor, last):
    return (order > floor) | ((order == floor) & (token <= last))


@triton.jit
def _exact(start, base, top, inverse, key, floor, last, vocab, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """``_best`` with the score of every token, in steps."""
    best = tl.full([], float("-inf"), tl.float32)
    found = tl.full([], 0, tl.int32)
    for first in range(start, start + BLOCK, STEP):
        token = first + tl.arange(0, STEP)
        x = tl.load(base + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        keep = (token < vocab) & _survives(ordered(x), token, floor, last)
        score = tl.where(keep, (x - top) * inverse + gumbel(key, token), float("-inf"))
        high, at = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
        found = tl.where(high > best, first + at, found)
        best = tl.maximum(best, high)
    return best, found


@triton.jit
def _best(x, start, base, top, inverse, key, floor, last, vocab, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """(score, id) of the best of a slice's survivors, the lowest id of the best; minus infinity if there is none that
    can be the best of its row. x: the slice's logits.

    Bounds of the scores are cheap, and mostly one token's score exceeds all others' bounds.
    """
    token = start + tl.arange(0, BLOCK)
    keep = (token < vocab) & _survives(ordered(x), token, floor, last)
    bound = tl.where(keep, (x - top) * inverse + gumbel_bound(key, token), float("-inf"))
    high, at = tl.max(bound, axis=0, return_indices=True, return_indices_tie_break_left=True)
    best = tl.full([], float("-inf"), tl.float32)
    found = start + at
    if high > _LEAST:
        near = tl.load(base + found, mask=found < vocab, other=float("-inf")).to(tl.float32)
        best = (near - top) * inverse + gumbel(key, found)
        if tl.max(((bound >= best) & (token != found)).to(tl.int32), axis=0) > 0:
            best, found = _exact(start, base, top, inverse, key, floor, last, vocab, BLOCK, STEP)
    return best, found


@triton.jit
def _mass_down_to(whole, start, base, top, inverse, vocab, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """The mass of a slice's tokens whose order is ``whole`` or more, in steps as well."""
    mass = tl.zeros([STEP], tl.int64)
    for first in range(start, start + BLOCK, STEP):
        token = first + tl.arange(0, STEP)
        x = tl.load(base + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        mass += weight_of(tl.where(ordered(x) >= whole, x, float("-inf")), top, inverse)
    return tl.sum(mass, axis=0)


@triton.jit
def score_kernel(
    logits_ptr,
    top_ptr,
    temperature_ptr,
    seed_lo_ptr,
    seed_hi_ptr,
    positions_ptr,
    whole_ptr,
    floor_ptr,
    last_ptr,
    chosen_ptr,
    mass_ptr,
    score_ptr,
    id_ptr,
    float_stride,
    int_stride,
    position_stride,
    stride,
    vocab,
    slices,
    FILTER: tl.constexpr,
    AGAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Per (row, part) of rows with a temperature and no token yet: the best score of each slice and its lowest id; for
    an open top-p also the mass that it takes its share of. AGAIN: only of rows whose top-p is open, without the mass.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row * float_stride)
    state = tl.full([], UNWEIGHED, tl.int32)
    if FILTER:
        state = tl.load(chosen_ptr + row)
    wanted = (state < 0) & (temperature > 0.0)
    if AGAIN:
        wanted = state == WEIGHED
    if wanted:
        top, sound = row_top(top_ptr, row, slices, SLICES)
        if sound:
            inverse = reciprocal(temperature)
            key = row_key(
                tl.load(seed_lo_ptr + row * int_stride),
                tl.load(seed_hi_ptr + row * int_stride),
                tl.load(positions_ptr + row * position_stride),
            )
            base = logits_ptr + row * stride
            floor, last = LOWEST, HIGHEST
            if FILTER:
                floor, last = tl.load(floor_ptr + row), tl.load(last_ptr + row)
            for block in range(part, slices, tl.num_programs(1)):
                start = block * BLOCK
                best, found = tl.full([], float("-inf"), tl.float32), start
                if (tl.load(top_ptr + row * slices + block) - top) * inverse >= _FAR:
                    token = start + tl.arange(0, BLOCK)
                    x = tl.load(base + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
                    best, found = _best(x, start, base, top, inverse, key, floor, last, vocab, BLOCK, STEP)
                    if FILTER and not AGAIN:  # noqa: SIM102 - that is decided at compile time
                        if state == WEIGHED:
                            whole = tl.load(whole_ptr + row)
                            mass = _mass_down_to(whole, start, base, top, inverse, vocab, BLOCK, STEP)
                            tl.atomic_add(mass_ptr + row * 2, mass, sem="relaxed")
                tl.store(score_ptr + row * slices + block, best)
                tl.store(id_ptr + row * slices + block, found)


@triton.jit
def _mass_before(base, block, token, near, top, inverse, vocab, BLOCK: tl.constexpr):
    """The mass of a slice's tokens before this one, whose logit is ``near``, per lane."""
    other = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(base + other, mask=other < vocab, other=float("-inf")).to(tl.float32)
    before = (x > near) | ((x == near) & (other < token))
    return weight_of(tl.where(before, x, float("-inf")), top, inverse)


@triton.jit
def weigh_kernel(
    logits_ptr,
    top_ptr,
    temperature_ptr,
    top_p_ptr,
    floor_ptr,
    last_ptr,
    chosen_ptr,
    count_ptr,
    mass_ptr,
    score_ptr,
    id_ptr,
    float_stride,
    stride,
    vocab,
    slices,
    BLOCK: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Per (row, part) of rows whose top-p is open: the mass before the best token. The part that ends last chooses that
    token, or leaves only the tokens before it.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(chosen_ptr + row) == WEIGHED:
        top, _ = row_top(top_ptr, row, slices, SLICES)
        inverse = reciprocal(tl.load(temperature_ptr + row * float_stride))
        others = tl.arange(0, SLICES)
        score = tl.load(score_ptr + row * slices + others, mask=others < slices, other=float("-inf"))
        _, at = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.load(id_ptr + row * slices + at)
        base = logits_ptr + row * stride
        near = tl.load(base + token).to(tl.float32)
        mass = tl.zeros([BLOCK], tl.int64)
        for block in range(part, slices, tl.num_programs(1)):
            if tl.load(top_ptr + row * slices + block) >= near:
                mass += _mass_before(base, block, token, near, top, inverse, vocab, BLOCK)
        # One thread adds and counts for all: the release of the count publishes its sum.
        tl.atomic_add(mass_ptr + row * 2 + 1, tl.sum(mass, axis=0), sem="relaxed")
        if tl.atomic_add(count_ptr + row * 2 + 1, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            before = tl.atomic_add(mass_ptr + row * 2 + 1, tl.full([], 0, tl.int64), sem="relaxed")
            if before < budget_of(tl.load(mass_ptr + row * 2), tl.load(top_p_ptr + row * float_stride)):
                tl.store(chosen_ptr + row, token)
            else:
                tl.store(floor_ptr + row, ordered(near))
                tl.store(last_ptr + row, token - 1)
                tl.store(mass_ptr + row * 2 + 1, tl.full([], 0, tl.int64))
                tl.store(count_ptr + row * 2 + 1, 0)


@triton.jit
def decided(base, top, inverse, key, budget, floor, last, slices, vocab, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """The token of a row whose top-p is open, by one program: draws until one succeeds, as the maximum does."""
    token = tl.full([], 0, tl.int32)
    before, score = budget, tl.full([], 0.0, tl.float32)
    while (before >= budget) & (score > float("-inf")):  # terminates even if no token survives
        score = tl.full([], float("-inf"), tl.float32)
        for block in range(slices):
            other = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(base + other, mask=other < vocab, other=float("-inf")).to(tl.float32)
            best, found = _best(x, block * BLOCK, base, top, inverse, key, floor, last, vocab, BLOCK, STEP)
            token = tl.where(best > score, found, token)
            score = tl.maximum(score, best)
        near = tl.load(base + token).to(tl.float32)
        mass = tl.zeros([BLOCK], tl.int64)
        for block in range(slices):
            mass += _mass_before(base, block, token, near, top, inverse, vocab, BLOCK)
        before = tl.sum(mass, axis=0)
        floor, last = ordered(near), token - 1
    return token
