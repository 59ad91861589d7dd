"""What was measured decides where the config leaves the choice open, also by number of rows."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_core.errors import BackendError
from minisgl_core.plugin_api import OneOf
from minisgl_core.registry import Bucket, Choice, DeviceFacts, Plan, PlanEntry, PlanQuery
from minisgl_core.registry.explain import explain

DECODE = "attention.decode"


@pytest.fixture
def two_attentions(world: Any, make_spec: Any, cpu_sim: None) -> None:
    world.plugin("one", make_spec("attention", "small", tier=1))
    world.plugin("two", make_spec("attention", "large", tier=2))


def decode_rows(plan: Plan) -> list[tuple[int | None, str]]:
    return [(largest, choice.name) for largest, choice in plan.by_batch("attention", phase="decode")]


def test_the_cheapest_backend_of_each_number_of_rows_is_chosen(two_attentions: None, resolve: Any) -> None:
    measured = {
        DECODE: [
            (2, {"small": 1.0, "large": 2.0}),
            (8, {"small@one": 1.0, "large@two": 2.0}),
            (64, {"small": 3.0, "large": 2.0}),
            (None, {"small": 9.0, "large": 2.0}),
        ]
    }
    plan = resolve(calibration_by_batch=measured)
    assert decode_rows(plan) == [(8, "small"), (None, "large")]
    assert plan.choice("attention", phase="decode", batch=8).name == "small"
    assert plan.choice("attention", phase="decode", batch=9).name == "large"
    assert plan.choice("attention", phase="decode").name == "large", "the bucket of every size is the fallback"
    assert len(plan.by_batch("attention", phase="prefill")) == 1, "it was not measured"
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.summary()["attention.decode[1-8]"] == "small@one"


def test_every_number_of_rows_is_in_one_bucket(two_attentions: None, resolve: Any) -> None:
    """Where two of them met in one number, the narrower one, made for more rows, would serve it."""
    measured = {
        DECODE: [
            (16, {"small": 1.0, "large": 2.0}),
            (20, {"small": 3.0, "large": 2.0}),
            (None, {"small": 1.0, "large": 2.0}),
        ]
    }
    plan = resolve(calibration_by_batch=measured)
    ranges = [bucket.batch for bucket in plan.buckets if bucket.entry.label == DECODE]
    assert ranges == [(1, 16), (17, 20), None]
    names = [plan.choice("attention", phase="decode", batch=rows).name for rows in (1, 16, 17, 20, 21)]
    assert names == ["small", "small", "large", "large", "small"]
    assert decode_rows(plan) == [(16, "small"), (20, "large"), (None, "small")]


def test_the_ranges_of_a_plan_follow_each_other_without_a_gap_or_an_overlap(two_attentions: None, resolve: Any) -> None:
    """The planted fault "plan buckets overlapping by one row"."""
    small, large = {"small": 1.0, "large": 2.0}, {"small": 2.0, "large": 1.0}
    plan = resolve(calibration_by_batch={DECODE: [(4, small), (9, large), (None, small)]})
    buckets = [bucket for bucket in plan.buckets if bucket.label.startswith(DECODE)]
    assert [(bucket.batch, bucket.choice.name) for bucket in buckets] == [
        ((1, 4), "small"),
        ((5, 9), "large"),
        (None, "small"),
    ]


def test_a_name_in_the_config_beats_every_measurement(two_attentions: None, resolve: Any) -> None:
    measured = {DECODE: [(None, {"small": 1.0, "large": 9.0})]}
    assert decode_rows(resolve(backends={"attention": "large"}, calibration_by_batch=measured)) == [(None, "large")]
    # the first of a list is named, whatever the list allows in addition
    listed = resolve(backends={"attention": ["large", "auto"]}, calibration_by_batch=measured)
    assert decode_rows(listed) == [(None, "large")]


def test_a_cheap_backend_that_does_not_fit_is_not_chosen(
    world: Any, make_spec: Any, cpu_sim: None, resolve: Any
) -> None:
    world.plugin("one", make_spec("attention", "fits", tier=1))
    world.plugin("two", make_spec("attention", "cheap", tier=2, page_sizes=OneOf(48)))
    measured = {DECODE: [(4, {"fits": 5.0, "cheap": 1.0}), (None, {"fits": 5.0, "cheap": 1.0})]}
    plan = resolve(page_size=16, calibration_by_batch=measured)
    assert decode_rows(plan) == [(None, "fits")]


def test_rows_that_were_not_measured_keep_the_unmeasured_choice(two_attentions: None, resolve: Any) -> None:
    measured = {DECODE: [(4, {"large": 1.0}), (None, {})]}
    default = decode_rows(resolve())[0][1]
    assert decode_rows(resolve(calibration_by_batch=measured)) == [(4, "large"), (None, default)]


def test_a_weight_that_was_measured_gets_a_choice_of_its_own(
    world: Any, make_spec: Any, cpu_sim: None, resolve: Any
) -> None:
    world.plugin("one", make_spec("linear", "skinny", tier=95))
    measured = {"linear.96x64": [(16, {"skinny": 1.0, "plain": 2.0}), (None, {"skinny": 2.0, "plain": 1.0})]}
    plan = resolve(calibration_by_batch=measured)
    assert plan.shapes("linear") == [(96, 64)]
    assert [(rows, item.name) for rows, item in plan.by_batch("linear", shape=(96, 64))] == [
        (16, "skinny"),
        (None, "plain"),
    ]
    assert [item.name for _, item in plan.by_batch("linear", shape=(64, 96))] == [plan.choice("linear").name]
    assert resolve(backends={"linear": "plain"}, calibration_by_batch=measured).shapes("linear") == []


def test_explain_says_chosen_of_every_backend_of_a_plan_entry(
    two_attentions: None, world: Any, make_model: Any
) -> None:
    measured = {DECODE: [(8, {"small": 1.0, "large": 2.0}), (None, {"small": 2.0, "large": 1.0})]}
    query = PlanQuery(make_model(), DeviceFacts("cpu"), "bfloat16", calibration_by_batch=measured)
    answer = explain(query, world.registry())
    (decode,) = [entry for entry in answer.entries if entry.entry.label == DECODE]
    assert {item.backend for item in decode.candidates if item.status == "chosen"} == {"small@one", "large@two"}


def make_plan(*buckets: Bucket) -> Plan:
    return Plan(16, "NHD", False, "float32", "float32", 1, "cpu", "X", "0", buckets)


def choice(name: str) -> Choice:
    return Choice("attention", name, "", "some", "1", "m:C")


def test_a_plan_of_ranges_only_serves_what_lies_above_by_the_last() -> None:
    entry = PlanEntry("attention", phase="decode")
    plan = make_plan(Bucket(entry, choice("a"), (1, 4)), Bucket(entry, choice("b"), (5, 8)))
    assert [(rows, item.name) for rows, item in plan.by_batch("attention", phase="decode")] == [(4, "a"), (None, "b")]


def test_a_plan_with_a_gap_is_refused() -> None:
    entry = PlanEntry("attention", phase="decode")
    plan = make_plan(Bucket(entry, choice("a"), (1, 4)), Bucket(entry, choice("b"), (6, 8)))
    with pytest.raises(BackendError, match=r"no backend for attention\.decode"):
        plan.by_batch("attention", phase="decode")


def test_the_narrower_of_two_ranges_wins() -> None:
    entry = PlanEntry("attention", phase="decode")
    plan = make_plan(Bucket(entry, choice("wide"), (1, 100)), Bucket(entry, choice("one"), (7, 7)))
    assert [(rows, item.name) for rows, item in plan.by_batch("attention", phase="decode")] == [
        (6, "wide"),
        (7, "one"),
        (None, "wide"),
    ]
