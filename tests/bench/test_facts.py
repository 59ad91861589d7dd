"""Differences between two measurements are described by names of settings and backends, not by digests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minisgl_core.bench.facts import differences, plan_facts
from minisgl_core.plan import Bucket, Choice, PlanEntry
from minisgl_core.registry import Plan


def _choice(role: Any, name: str, **more: Any) -> Choice:
    return Choice(role, name, "", "minisgl-mine", more.pop("version", "1.0"), "mine:Class", **more)


PLAN = Plan(
    page_size=1,
    kv_layout="NHD",
    graph=False,
    dtype="float32",
    kv_dtype="float32",
    tp_size=1,
    device="cpu",
    architecture="LlamaForCausalLM",
    core_version="1.0",
    buckets=(
        Bucket(PlanEntry("attention", phase="decode"), _choice("attention", "fast", options={"splits": 2})),
        Bucket(PlanEntry("kv"), _choice("kv", "fast")),
    ),
)


def _with(entry: int, choice: Choice) -> Plan:
    buckets = list(PLAN.buckets)
    buckets[entry] = replace(buckets[entry], choice=choice)
    return replace(PLAN, buckets=tuple(buckets))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (replace(PLAN, page_size=16, graph=True), "page_size is 1 there and 16 here; graphs is off there and on here"),
        (_with(1, _choice("kv", "slow")), "kv is fast@minisgl-mine there and slow@minisgl-mine here"),
        (
            _with(0, _choice("attention", "fast", options={"splits": 4})),
            'options."attention:fast": splits is 2 there and 4 here',
        ),
        (_with(0, _choice("attention", "fast")), 'options."attention:fast" is splits 2 there and absent here'),
        (_with(1, _choice("kv", "fast", version="1.1")), "minisgl-mine version is 1.0 there and 1.1 here"),
        (replace(PLAN, buckets=PLAN.buckets[:1]), "kv is fast@minisgl-mine there and absent here"),
    ],
)
def test_the_choices_of_two_plans_are_listed(other: Plan, text: str) -> None:
    there, here = ({"default": {"plan": plan_facts(plan), "cache": "radix"}} for plan in (PLAN, other))
    assert differences(there, here) == text
    assert differences(here, here) == ""


def test_digests_are_listed_if_nothing_else_differs() -> None:
    other = replace(PLAN, fallbacks=("kv: the first cannot run",))
    there, here = {"plan": plan_facts(PLAN)}, {"plan": plan_facts(other)}
    text = f"plan is {PLAN.digest()} there and {other.digest()} here (what else is kept of it is the same)"
    assert differences(there, here) == text


def test_more_than_six_differences_are_counted() -> None:
    names = "abcdefgh"
    text = differences(dict.fromkeys(names, 1), dict.fromkeys(names, None))
    assert text.startswith("a is 1 there and unset here; b is ") and text.endswith(
        "f is 1 there and unset here; and 2 more"
    )
