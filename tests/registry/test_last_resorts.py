"""Newcomers: served unnamed only where no incumbent fits, and then explain and the start both say so."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from minisgl_core.plugin_api import OneOf
from minisgl_core.registry import DeviceFacts, PlanQuery
from minisgl_core.registry.explain import explain

CPU = DeviceFacts("cpu")
BOTH = "attention.decode, attention.prefill"
SERVES = "last@p serves as a last resort, because"
WIDE = "head_dims: wanted 128, supported 256"


@pytest.fixture
def remarks_of(world: Any, make_spec: Any, make_model: Any, resolve: Any, caplog: pytest.LogCaptureFixture) -> Any:
    """``remarks_of(*specs, **query fields)``: what a start and explain both remark of a newcomer among these."""

    def run(*others: Any, **fields: Any) -> list[str]:
        world.plugin("p", make_spec("attention", "last", tier=0))
        world.plugin("minisgl-cuda", make_spec("kv", "k"), *others)
        with caplog.at_level(logging.WARNING, "minisgl"):
            plan = resolve(**fields)
        answer = explain(PlanQuery(make_model(), CPU, "bfloat16", **fields), world.registry())
        expected = [record.getMessage() for record in caplog.records]
        assert expected == [*plan.fallbacks, *answer.remarks]
        return list(answer.remarks)

    return run


def test_what_does_not_fit_is_remarked_with_its_reasons(remarks_of: Any, make_spec: Any) -> None:
    wide = make_spec("attention", "wide", head_dims=OneOf(256))
    narrow = make_spec("attention", "half", dtypes=("float16",), phases=("decode",))
    half = "half@minisgl-cuda (dtypes: wanted bfloat16, supported float16)"
    assert remarks_of(wide, narrow) == [
        f"attention.decode: {SERVES} nothing else fits: {half}, wide@minisgl-cuda ({WIDE})",
        f"attention.prefill: {SERVES} nothing else fits: wide@minisgl-cuda ({WIDE})",
    ]


@pytest.mark.parametrize("others", [(), ({"devices": ("cuda",)},), ({"head_dims": OneOf(256), "stand_in": True},)])
def test_where_nothing_else_is_meant_for_it_there_is_nothing_to_say(
    remarks_of: Any, make_spec: Any, others: Sequence[dict[str, Any]]
) -> None:
    assert remarks_of(*(make_spec("attention", "other", **fields) for fields in others)) == []


@pytest.mark.parametrize("choice", ["last", ["wide", "last"]])
def test_one_that_is_named_is_not_remarked(remarks_of: Any, make_spec: Any, choice: Any) -> None:
    assert remarks_of(make_spec("attention", "wide", head_dims=OneOf(256)), backends={"attention": choice}) == []


def test_one_that_auto_took_behind_a_name_is_remarked(remarks_of: Any, make_spec: Any) -> None:
    wide = make_spec("attention", "wide", head_dims=OneOf(256))
    expected = f"{BOTH}: {SERVES} nothing else fits: wide@minisgl-cuda ({WIDE})"
    assert remarks_of(wide, backends={"attention": ["wide", "auto"]}) == [expected]


@pytest.mark.parametrize("costs", [None, {"last": 1.0, "good": 2.0}])
def test_next_to_one_that_fits_it_is_not_chosen_or_was_measured_to_be_faster(
    remarks_of: Any, make_spec: Any, costs: dict[str, float] | None
) -> None:
    measured = None if costs is None else {f"attention.{phase}": costs for phase in ("decode", "prefill")}
    assert remarks_of(make_spec("attention", "good"), calibration=measured) == []
