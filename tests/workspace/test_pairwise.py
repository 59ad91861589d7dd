from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.pairwise import covering_array, feasible_pairs, full_product

FACTORS = {"a": (1, 2, 3), "b": ("x", "y", "z"), "c": (False, True), "d": (0, 4)}


def pairs_in(rows: list[dict[str, object]]) -> set[frozenset[tuple[str, object]]]:
    return {
        frozenset({one, other}) for row in rows for one in row.items() for other in row.items() if one[0] != other[0]
    }


def test_every_pair_is_there_in_few_rows() -> None:
    rows = covering_array(FACTORS)
    assert pairs_in(rows) == feasible_pairs(FACTORS)
    assert len(feasible_pairs(FACTORS)) == 9 + 4 * 6 + 4
    assert 9 <= len(rows) <= 11  # 36 in the full product
    assert all(list(row) == list(FACTORS) for row in rows)


def test_it_is_the_same_each_time() -> None:
    assert covering_array(FACTORS) == covering_array({name: tuple(levels) for name, levels in FACTORS.items()})


def test_forbidden_pairs_stay_out_and_their_levels_in() -> None:
    forbidden = {frozenset({("a", 1), ("c", True)}), frozenset({("b", "x"), ("d", 4)})}
    rows = covering_array(FACTORS, forbidden)
    assert pairs_in(rows) == feasible_pairs(FACTORS) - forbidden
    assert len(full_product(FACTORS, forbidden)) == sum(
        not (a == 1 and c) and not (b == "x" and d == 4)
        for a in FACTORS["a"]
        for b in FACTORS["b"]
        for c in FACTORS["c"]
        for d in FACTORS["d"]
    )


def test_a_pair_that_no_row_can_hold_is_an_error() -> None:
    forbidden = [frozenset({("c", True), ("d", level)}) for level in FACTORS["d"]]
    with pytest.raises(ValueError, match=r"no row for .*\('c', True\)"):
        covering_array(FACTORS, forbidden)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=6))
def test_any_sizes(sizes: list[int]) -> None:
    factors = {f"f{i}": tuple(range(size)) for i, size in enumerate(sizes)}
    rows = covering_array(factors)
    assert pairs_in(rows) == feasible_pairs(factors)
    largest, second = sorted(sizes)[:-3:-1]
    assert len(rows) >= largest * second
