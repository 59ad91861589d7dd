from __future__ import annotations

import json
from dataclasses import replace

import pytest

from minisgl_core.errors import BackendError
from minisgl_core.registry import Bucket, Choice, Plan, Slot


def choice_of(role: str, name: str, **fields: object) -> Choice:
    return Choice(role, name, "v", "dist", "1.0", "a.b:C", **fields)  # type: ignore[arg-type]


PLAN = Plan(
    page_size=16,
    kv_layout="NHD",
    graph=True,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    tp_size=2,
    device="cuda sm90",
    architecture="Qwen3ForCausalLM",
    core_version="0.1.0",
    buckets=(
        Bucket(Slot("attention", phase="prefill"), choice_of("attention", "fa", options={"splits": 4})),
        Bucket(
            Slot("attention", phase="decode"),
            choice_of("attention", "small", host_plan=("decode",), page_size=1, graph="decode"),
            batch=(1, 8),
        ),
        Bucket(Slot("attention", phase="decode"), choice_of("attention", "fa", finite_tail=True)),
        Bucket(Slot("ops", op="sample"), choice_of("ops", "fused", ops=("sample",), per_row_seed=True)),
        Bucket(Slot("linear"), choice_of("linear", "plain")),
        Bucket(Slot("linear", shape=(4096, 1024)), choice_of("linear", "wide")),
        Bucket(Slot("linear", shape=(4096, 1024)), choice_of("linear", "skinny"), batch=(1, 16)),
    ),
    fallbacks=("attention.decode: x cannot run; using fa",),
)


def test_a_plan_is_plain_json_and_comes_back_equal() -> None:
    text = json.dumps(PLAN.to_json())
    assert Plan.from_json(json.loads(text)) == PLAN
    assert Plan.from_json(text) == PLAN


def test_the_narrowest_bucket_that_covers_a_step_is_used() -> None:
    assert PLAN.choice("attention", phase="decode", batch=8).name == "small"
    assert PLAN.choice("attention", phase="decode", batch=9).name == "fa"
    assert PLAN.choice("attention", phase="decode").name == "fa"
    assert PLAN.choice("linear", shape=(4096, 1024), batch=1).name == "skinny"
    assert PLAN.choice("linear", shape=(4096, 1024), batch=17).name == "wide"
    assert PLAN.choice("linear", shape=(1024, 4096), batch=1).name == "plain"
    assert [item.name for item in PLAN.choices("linear")] == ["plain", "wide", "skinny"]


def test_a_slot_that_the_plan_lacks_is_an_error_naming_it() -> None:
    with pytest.raises(BackendError, match=r"no backend for ops\.route; it has attention\.decode"):
        PLAN.choice("ops", op="route")
    with pytest.raises(BackendError, match="no backend for moe"):
        PLAN.choice("moe")


def test_digests_are_equal_only_for_equal_plans() -> None:
    assert PLAN.digest() == Plan.from_json(PLAN.to_json()).digest()
    other_option = replace(PLAN.buckets[0], choice=replace(PLAN.buckets[0].choice, options={"splits": 8}))
    changed = [
        replace(PLAN, page_size=32),
        replace(PLAN, buckets=PLAN.buckets[1:]),
        replace(PLAN, buckets=(other_option, *PLAN.buckets[1:])),
        replace(PLAN, buckets=(replace(PLAN.buckets[0], batch=(1, 2)), *PLAN.buckets[1:])),
    ]
    assert len({plan.digest() for plan in (PLAN, *changed)}) == 5


def test_a_plan_of_another_format_is_refused() -> None:
    with pytest.raises(BackendError, match="format 99 cannot be read, this core reads format 1"):
        Plan.from_json({**PLAN.to_json(), "format": 99})
