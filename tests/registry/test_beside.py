"""A backend beside a plan: found by name, judged at the plan's own pool, probed like the others."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_core.errors import BackendError
from minisgl_core.plugin_api import OneOf, Reason
from minisgl_core.registry import DeviceFacts, PlanEntry, PlanQuery
from minisgl_core.registry.beside import choice_beside

DECODE, PREFILL = (PlanEntry("attention", phase=phase) for phase in ("decode", "prefill"))


@pytest.fixture
def beside(world: Any, make_model: Any, resolve: Any, cpu_sim: None) -> Any:
    """``beside(entry, name, **query fields)`` next to the plan for the same query."""

    def run(entry: PlanEntry, name: str, prober: Any = None, **fields: Any) -> Any:
        plan = resolve(**fields)
        query = PlanQuery(make_model(), DeviceFacts("cpu"), "bfloat16", **fields)
        more = {} if prober is None else {"prober": prober}
        return choice_beside(plan, query, entry, name, world.registry(), **more)

    return run


def test_a_backend_that_fits_is_chosen_with_its_own_page_size(beside: Any, world: Any, make_spec: Any) -> None:
    world.plugin("new", make_spec("attention", "new", page_sizes=OneOf(8), phases=("decode",), factory="m:New"))
    choice, reasons = beside(DECODE, "new", page_size=16)
    assert (choice.label, choice.factory, choice.page_size, tuple(reasons)) == ("new@new", "m:New", 8, ())
    choice, reasons = beside(PREFILL, "new", page_size=16)
    assert choice is None and [reason.code for reason in reasons] == ["phase"]


def test_the_plans_page_size_decides(beside: Any, world: Any, make_spec: Any) -> None:
    world.plugin("new", make_spec("attention", "new", page_sizes=OneOf(48)))
    choice, reasons = beside(DECODE, "new", page_size=16)
    assert choice is None and [reason.code for reason in reasons] == ["page_size"]


def test_graphs_do_not_matter(beside: Any, world: Any, make_spec: Any) -> None:
    world.plugin("new", make_spec("attention", "new", graph="never"))
    assert beside(DECODE, "new", graph=True, backends={"graph": "emulated"})[0].label == "new@new"


def test_the_first_variant_that_fits_is_taken(beside: Any, world: Any, make_spec: Any) -> None:
    variants = (
        make_spec("attention", "new", variant="a", head_dims=OneOf(7)),
        make_spec("attention", "new", variant="b"),
    )
    world.plugin("new", *variants)
    assert beside(DECODE, "new")[0].label == "new/b@new"
    assert beside(DECODE, "new/a")[0] is None


def test_a_refused_probe_is_a_reason(beside: Any, world: Any, make_spec: Any) -> None:
    world.plugin("new", make_spec("attention", "new", probe="m:probe"))
    refusal = Reason("probe", "probe", "a working backend", "it crashed")
    assert beside(DECODE, "new", prober=lambda requests: {requests[0].key: refusal}) == (None, [refusal])
    assert beside(DECODE, "new", prober=lambda requests: {})[0] is not None


def test_an_unknown_name_lists_what_there_is(beside: Any) -> None:
    with pytest.raises(BackendError, match="no plugin offers the attention backend 'nwe'"):
        beside(DECODE, "nwe")
