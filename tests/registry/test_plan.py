from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from minisgl_core.errors import BackendError
from minisgl_core.registry import Bucket, Choice, Plan, PlanEntry


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
        Bucket(PlanEntry("attention", phase="prefill"), choice_of("attention", "fa", options={"splits": 4})),
        Bucket(
            PlanEntry("attention", phase="decode"),
            choice_of("attention", "small", host_plan=True, page_size=1, graph="decode"),
            batch=(1, 8),
        ),
        Bucket(PlanEntry("attention", phase="decode"), choice_of("attention", "fa", finite_tail=True)),
        Bucket(PlanEntry("ops", op="sample"), choice_of("ops", "fused", ops=("sample",))),
        Bucket(PlanEntry("linear"), choice_of("linear", "plain")),
        Bucket(PlanEntry("linear", shape=(4096, 1024)), choice_of("linear", "wide")),
        Bucket(PlanEntry("linear", shape=(4096, 1024)), choice_of("linear", "skinny"), batch=(1, 16)),
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


def test_a_plan_entry_that_the_plan_lacks_is_an_error_naming_it() -> None:
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


@pytest.mark.parametrize("field", [field.name for field in fields(Plan) if field.name != "buckets"])
def test_the_digest_covers_every_field_of_a_plan(field: str) -> None:
    """The planted fault "the digest without kv_dtype"."""
    other: dict[str, object] = {"page_size": 32, "tp_size": 4, "graph": False, "fallbacks": ()}
    changed = replace(PLAN, **{field: other.get(field, "other")})  # type: ignore[arg-type]
    assert changed.digest() != PLAN.digest()


@pytest.mark.parametrize("field", [field.name for field in fields(Choice)])
def test_the_digest_covers_every_field_of_a_choice(field: str) -> None:
    other: dict[str, object] = {
        "options": {"splits": 8},
        "ops": ("sample",),
        "page_size": 7,
        "host_plan": True,
        "finite_tail": True,
        "graph": "decode",
    }
    first, *rest = PLAN.buckets
    choice = replace(first.choice, **{field: other.get(field, "other")})  # type: ignore[arg-type]
    assert replace(PLAN, buckets=(replace(first, choice=choice), *rest)).digest() != PLAN.digest()


def test_a_plan_of_another_format_is_refused() -> None:
    with pytest.raises(BackendError, match="format 99 cannot be read, this core reads format 1"):
        Plan.from_json({**PLAN.to_json(), "format": 99})


def fusing(*listed: str, tp_size: int = 1, owner: str = "dist") -> tuple[Plan, Choice]:
    """A plan whose linear backend lists these operations; those of role ops are the distribution ``owner``'s."""
    linear = choice_of("linear", "fused", ops=listed)
    ops = [replace(choice_of("ops", "any"), distribution=owner)] * 3
    entries = [PlanEntry("ops", op=op) for op in ("add_rms_norm", "allreduce_add_rms_norm", "act_and_mul")]
    buckets = (*map(Bucket, entries, ops), Bucket(PlanEntry("linear"), linear))
    return replace(PLAN, tp_size=tp_size, buckets=buckets), linear


def test_products_fuse_what_their_backend_offers_and_the_plan_gives_to_its_distribution() -> None:
    both = ("add_rms_norm", "act_and_mul")
    for listed, kind, fused in (
        (both, {}, set(both)),
        (both, {"tp_size": 2}, {"act_and_mul"}),
        (both, {"owner": "another"}, set()),
        (("act_and_mul",), {}, {"act_and_mul"}),
        ((), {}, set()),
        # this list was not read before 1.2 of the linear API, and `route` is an operation that this plan does not have
        (("route", "rms_norm", "sample", "add_rms_norm"), {}, {"add_rms_norm"}),
    ):
        plan, linear = fusing(*listed, **kind)  # type: ignore[arg-type]
        assert plan.fused(linear) == fused
        assert Plan.from_json(plan.to_json()).fused(linear) == fused


def test_one_backend_for_the_norm_and_another_for_the_activation() -> None:
    plan, linear = fusing("add_rms_norm", "act_and_mul")
    for place, fused in enumerate(("act_and_mul", "act_and_mul", "add_rms_norm")):
        buckets = list(plan.buckets)  # both names of the norm must be its own
        buckets[place] = replace(buckets[place], choice=replace(buckets[place].choice, distribution="another"))
        assert replace(plan, buckets=tuple(buckets)).fused(linear) == {fused}
