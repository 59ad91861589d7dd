"""Covering arrays: few rows in which every pair of levels of two factors occurs together at least once.

Greedy, one row at a time (after Cohen, Dalal, Fredman and Patton 1997, section 3, without its random candidates), and
therefore the same on every machine.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations, product

__all__ = ["covering_array", "feasible_pairs", "full_product"]

Choice = tuple[str, Hashable]
"""A factor and one of its levels."""
Pair = frozenset[Choice]
Factors = Mapping[str, Sequence[Hashable]]


def feasible_pairs(factors: Factors, forbidden: Iterable[Pair] = ()) -> set[Pair]:
    """All pairs of levels of different factors, less the forbidden ones."""
    every = {
        frozenset({(one, a), (other, b)})
        for one, other in combinations(factors, 2)
        for a, b in product(factors[one], factors[other])
    }
    return every - set(forbidden)


def full_product(factors: Factors, forbidden: Iterable[Pair] = ()) -> list[dict[str, Hashable]]:
    """Every row that holds no forbidden pair."""
    banned = set(forbidden)
    rows = (dict(zip(factors, levels, strict=True)) for levels in product(*factors.values()))
    return [row for row in rows if not banned & _pairs_of(row)]


def covering_array(factors: Factors, forbidden: Iterable[Pair] = ()) -> list[dict[str, Hashable]]:
    """Rows that hold every feasible pair and no forbidden one.

    List the cheapest level of a factor first: where nothing else decides, it is taken. Raises ValueError if the
    forbidden pairs leave some other pair without a row.
    """
    banned = frozenset(forbidden)
    left, rows = feasible_pairs(factors, banned), []
    order = {choice: i for i, choice in enumerate((name, level) for name in factors for level in factors[name])}
    while left:
        seed = min(left, key=lambda pair: sorted(order[choice] for choice in pair))
        row = _complete(dict(seed), factors, banned, left)
        if row is None:
            raise ValueError(f"the forbidden pairs leave no row for {sorted(seed, key=order.__getitem__)}")
        rows.append({name: row[name] for name in factors})
        left -= _pairs_of(row)
    return rows


def _complete(
    row: dict[str, Hashable], factors: Factors, banned: frozenset[Pair], left: set[Pair]
) -> dict[str, Hashable] | None:
    """Fill the factors that ``row`` lacks, each with the level that covers most of what is ``left``; None if no levels
    go together."""
    missing = [name for name in factors if name not in row]
    if not missing:
        return row
    gains = {(name, level): _gain(row, (name, level), banned, left) for name in missing for level in factors[name]}
    name = max(missing, key=lambda name: max(gains[name, level] for level in factors[name]))
    for level in sorted(factors[name], key=lambda level: -gains[name, level]):
        if gains[name, level] >= 0:
            done = _complete({**row, name: level}, factors, banned, left)
            if done is not None:
                return done
    return None


def _gain(row: Mapping[str, Hashable], choice: Choice, banned: frozenset[Pair], left: set[Pair]) -> int:
    """How many pairs of ``left`` this choice adds to ``row``; -1 if it may not join it."""
    pairs = {frozenset({choice, other}) for other in row.items()}
    return -1 if pairs & banned else len(pairs & left)


def _pairs_of(row: Mapping[str, Hashable]) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}
