"""A backend other than the plan's: found by name, judged at the plan's own pool, probed like the others."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_core.errors import BackendError
from minisgl_core.plugin_api import OneOf, Reason
from minisgl_core.registry import DeviceFacts, PlanEntry, PlanQuery
from minisgl_core.registry.resolve import alternate_choice

DECODE, PREFILL = (PlanEntry("attention", phase=phase) for phase in ("decode", "prefill"))


@pytest.fixture
def alternate(world: Any, make_model: Any, resolve: Any, cpu_sim: None) -> Any:
    """``alternate(entry, name, **query fields)`` next to the plan for the same query."""

    def run(entry: PlanEntry, name: str, prober: Any = None, **fields: Any) -> Any:
        plan = resolve(**fields)
        query = PlanQuery(make_model(), DeviceFacts("cpu"), "bfloat16", **fields)
        more = {} if prober is None else {"prober": prober}
        return alternate_choice(plan, query, entry, name, world.registry(), **more)

    return run


def test_a_backend_that_fits_is_chosen_with_its_own_page_size(alternate: Any, world: Any, make_spec: Any) -> None:
    world.plugin("new", make_spec("attention", "new", page_sizes=OneOf(8), phases=("decode",), factory="m:New"))
    choice, reasons = alternate(DECODE, "new", page_size=16)
    assert (choice.label, choice.factory, choice.page_size, tuple(reasons)) == ("new@new", "m:New", 8, ())
    choice, reasons = alternate(PREFILL, "new", page_size=16)
    assert choice is None and [reason.code for reason in reasons] == ["phase"]


def test_the_plans_page_size_decides(alternate: Any, world: Any, make_spec: Any) -> None:
    world.plugin("new", make_spec("attention", "new", page_sizes=OneOf(48)))
    choice, reasons = alternate(DECODE, "new", page_size=16)
    assert choice is None and [reason.code for reason in reasons] == ["page_size"]


def test_graphs_do_not_matter(alternate: Any, world: Any, make_spec: Any) -> None:
    world.plugin("new", make_spec("attention", "new", graph="never"))
    assert alternate(DECODE, "new", graph=True, backends={"graph": "emulated"})[0].label == "new@new"


def test_the_first_variant_that_fits_is_taken(alternate: Any, world: Any, make_spec: Any) -> None:
    variants = (
        make_spec("attention", "new", variant="a", head_dims=OneOf(7)),
        make_spec("attention", "new", variant="b"),
    )
    world.plugin("new", *variants)
    assert alternate(DECODE, "new")[0].label == "new/b@new"
    assert alternate(DECODE, "new/a")[0] is None


def test_a_refused_probe_is_a_reason(alternate: Any, world: Any, make_spec: Any) -> None:
    world.plugin("new", make_spec("attention", "new", probe="m:probe"))
    refusal = Reason("probe", "probe", "a working backend", "it crashed")
    assert alternate(DECODE, "new", prober=lambda requests: {requests[0].key: refusal}) == (None, [refusal])
    assert alternate(DECODE, "new", prober=lambda requests: {})[0] is not None


def test_an_unknown_name_lists_what_there_is(alternate: Any) -> None:
    with pytest.raises(BackendError, match="no plugin offers the attention backend 'nwe'"):
        alternate(DECODE, "nwe")
