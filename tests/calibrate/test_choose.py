"""Costs, borders and rules, worked out by hand."""

from __future__ import annotations

import pytest

from minisgl_core.calibration.choose import costs_by_batch, costs_by_entry, rules_of
from minisgl_core.calibration.store import Point
from minisgl_core.registry import Bucket, Choice, Plan, PlanEntry

DECODE = "attention.decode"


def points(entry: str, table: dict[tuple[int, int], dict[str, float]]) -> list[Point]:
    """``{(rows, length): {backend: microseconds}}``"""
    return [
        Point(entry, rows, length, backend, "1", us)
        for (rows, length), times in table.items()
        for backend, us in times.items()
    ]


TWO = points(
    DECODE,
    {
        (1, 100): {"a": 10.0, "b": 20.0},
        (1, 400): {"a": 20.0, "b": 20.0},
        (16, 100): {"a": 30.0, "b": 20.0},
        (16, 400): {"a": 80.0, "b": 40.0},
    },
)


def test_a_cost_is_the_mean_over_lengths_of_time_over_the_fastest() -> None:
    # a: (1 + 1) / 2 at 1 row, (1.5 + 2) / 2 at 16; b: (2 + 1) / 2 and 1
    assert costs_by_entry(TWO) == {DECODE: {"a": pytest.approx((1 + 1.75) / 2), "b": pytest.approx((1.5 + 1) / 2)}}


def test_the_border_between_two_measured_sizes_is_their_geometric_mean() -> None:
    ((limit, few), (rest, many)) = costs_by_batch(TWO)[DECODE]
    assert (limit, rest) == (4, None)
    assert min(few, key=few.__getitem__) == "a" and min(many, key=many.__getitem__) == "b"


def test_a_small_gain_does_not_split_a_plan_entry() -> None:
    near = points(DECODE, {(1, 0): {"a": 100.0, "b": 102.0}, (16, 0): {"a": 200.0, "b": 100.0}})
    assert [min(costs, key=costs.__getitem__) for _, costs in costs_by_batch(near)[DECODE]] == ["b", "b"]
    far = points(DECODE, {(1, 0): {"a": 100.0, "b": 104.0}, (16, 0): {"a": 200.0, "b": 100.0}})
    assert [min(costs, key=costs.__getitem__) for _, costs in costs_by_batch(far)[DECODE]] == ["a", "b"]


def test_who_lacks_a_length_has_no_cost_there() -> None:
    table = {(1, 100): {"a": 1.0, "b": 2.0}, (1, 9000): {"b": 2.0}, (4, 100): {"a": 1.0, "b": 2.0}}
    (_, few), (_, many) = costs_by_batch(points(DECODE, table))[DECODE]
    assert set(few) == {"b"} and set(many) == {"a", "b"}
    assert set(costs_by_entry(points(DECODE, table))[DECODE]) == {"b"}


def test_only_attention_and_weights_are_chosen_by_rows_and_linear_means_all_weights() -> None:
    some = [
        *points("kv", {(1, 0): {"a": 1.0}}),
        *points("ops.sample", {(1, 0): {"a": 1.0}}),
        *points("linear.8x4", {(1, 0): {"a": 1.0, "b": 3.0}}),
        *points("linear.4x8", {(1, 0): {"a": 2.0, "b": 1.0}}),
    ]
    assert set(costs_by_batch(some)) == {"linear.8x4", "linear.4x8"}
    assert costs_by_entry(some)["linear"] == {"a": 1.5, "b": 2.0}
    assert "linear" not in costs_by_entry(points("kv", {(1, 0): {"a": 1.0}}))


def test_case_127_a_rule_is_what_the_plan_does() -> None:
    decode, kv = PlanEntry("attention", phase="decode"), PlanEntry("kv")
    a, b = (Choice("attention", name, "", "d", "1", "m:C") for name in "ab")
    buckets = (Bucket(decode, a, (1, 4)), Bucket(decode, b), Bucket(kv, a))
    plan = Plan(1, "NHD", False, "f", "f", 1, "cpu", "X", "0", buckets)
    found = rules_of(plan, [*TWO, *points("kv", {(1, 0): {"b": 1.0}}), *points("linear.8x4", {(1, 0): {"b": 1.0}})])
    assert [str(item) for item in found] == ["attention.decode: a@d up to 4 rows, then b@d", "kv: a@d"]
    assert found[0].to_json() == {"entry": DECODE, "backends": ((4, "a@d"), (None, "b@d"))}


def test_case_127_a_gain_within_the_noise_is_none() -> None:
    near = points("kv", {(1, 0): {"a": 100.0, "b": 108.0, "c": 125.0}})
    assert costs_by_entry(near)["kv"] == {"a": 1.0, "b": 1.08, "c": 1.25}
    assert costs_by_entry(near, noise=0.1)["kv"] == {"a": 1.0, "b": 1.0, "c": 1.25}
    far = points(DECODE, {(1, 0): {"a": 100.0, "b": 104.0}, (16, 0): {"a": 200.0, "b": 100.0}})
    chosen = [min(costs, key=costs.__getitem__) for _, costs in costs_by_batch(far, noise=0.1)[DECODE]]
    assert chosen == ["b", "b"]


def test_adjacent_sizes_still_have_a_border() -> None:
    close = points(DECODE, {(1, 0): {"a": 1.0, "b": 2.0}, (2, 0): {"a": 2.0, "b": 1.0}, (3, 0): {"a": 1.0, "b": 2.0}})
    assert [limit for limit, _ in costs_by_batch(close)[DECODE]] == [1, 2, None]
