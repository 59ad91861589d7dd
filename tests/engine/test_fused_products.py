"""Products that fuse the norm before and the activation after them: where the plan allows it, with the same tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.core import SamplingParams
from minisgl_core.engine import EngineConfig
from minisgl_core.engine.linear_router import LinearRoute, LinearRouter
from minisgl_core.engine.plan_resolution import make_plan
from minisgl_core.llm import LLM
from minisgl_core.modelconfig import read_model_config
from minisgl_core.plugin_api import OP_NAMES
from minisgl_core.registry import Bucket, Plan, PlanEntry

pytest.importorskip("minisgl_cpu_sim")

from minisgl_cpu_sim.pure.linear import FusedTorchLinear

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13], [14, 15, 16, 17, 18]]
SETTINGS: dict[str, Any] = {
    "dtype": torch.float32,
    "device": "cpu",
    "max_running_req": 4,
    "num_page_override": 256,
    "max_seq_len_override": 64,
    "progress": False,
}
BOTH = frozenset({"add_rms_norm", "act_and_mul"})


def plan_for(path: Path, linear: str, ops: str = "cpu", **settings: Any) -> Plan:
    backends = {"attention": "torch", "kv": "torch", "ops": ops, "linear": linear, "graph": "emulated"}
    config = EngineConfig(str(path), backends=backends, **{**SETTINGS, **settings})
    return make_plan(config, read_model_config(str(path)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[bool, bool]]:
    """How often products fused (a norm, an activation); none may have more rows than the backend allows."""
    seen: Counter[tuple[bool, bool]] = Counter()
    inner = FusedTorchLinear.forward_fused

    def forward(self: Any, x: torch.Tensor, weights: Any, bias: Any, norm: Any, act: bool) -> Any:
        assert x.shape[0] <= self.fused_rows(weights, norm is not None, act)
        seen[norm is not None, act] += 1
        return inner(self, x, weights, bias, norm, act)

    monkeypatch.setattr(FusedTorchLinear, "forward_fused", forward)
    return seen


def answers(path: Path, plan: Plan, **settings: Any) -> list[list[int]]:
    with LLM(path, plan=plan.to_json(), **{**SETTINGS, **settings}) as llm:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        return [item["token_ids"] for item in llm.generate(PROMPTS, params, progress=False)]


@pytest.mark.parametrize("model", ["q3", "moe2"])
@pytest.mark.parametrize("graph", [0, 4])
def test_the_same_tokens(
    model: str, graph: int, tiny: Callable[[str], Path], calls: Counter[tuple[bool, bool]]
) -> None:
    """A router reads the norm that its experts read: there only attention's projection fuses its norm."""
    path = tiny(model)
    plain = answers(path, plan_for(path, "plain", cuda_graph_max_bs=graph), cuda_graph_max_bs=graph)
    assert not calls
    plan = plan_for(path, "fused", cuda_graph_max_bs=graph)
    assert plan.fused(plan.choice("linear")) == BOTH
    assert answers(path, plan, cuda_graph_max_bs=graph) == plain
    dense = {(True, False), (True, True)}
    assert set(calls) == (dense if model == "q3" else {(True, False), (False, True)})


def test_nothing_runs_that_was_not_chosen(tiny: Callable[[str], Path], calls: Counter[tuple[bool, bool]]) -> None:
    path = tiny("q3")
    plan = plan_for(path, "fused", ops="composed")
    assert plan.fused(plan.choice("linear")) == frozenset()
    assert answers(path, plan) == answers(path, plan_for(path, "plain", ops="composed"))
    assert not calls


@pytest.mark.parametrize("offered", [("act_and_mul",), ("add_rms_norm",)])
def test_what_the_backend_does_not_offer_is_not_fused(
    offered: tuple[str, ...], tiny: Callable[[str], Path], calls: Counter[tuple[bool, bool]]
) -> None:
    path = tiny("q3")
    plan = plan_for(path, "fused")
    buckets = tuple(
        replace(each, choice=replace(each.choice, ops=offered)) if each.entry.role == "linear" else each
        for each in plan.buckets
    )
    assert answers(path, replace(plan, buckets=buckets)) == answers(path, plan_for(path, "plain"))
    assert set(calls) == {("add_rms_norm" in offered, "act_and_mul" in offered)}


def test_a_backend_that_only_lists_operations_takes_nothing_in(
    tiny: Callable[[str], Path], calls: Counter[tuple[bool, bool]]
) -> None:
    """Its plugin is older than the API that reads the list."""
    path = tiny("q3")
    fused, plain = plan_for(path, "fused"), plan_for(path, "plain")
    older = replace(plain.choice("linear"), distribution="minisgl-cpu-sim", ops=OP_NAMES)
    plan = replace(plain, buckets=tuple(each for each in plain.buckets if each.entry.role != "linear"))
    plan = replace(plan, buckets=(*plan.buckets, Bucket(PlanEntry("linear"), older)))
    assert plan.fused(older) == BOTH
    assert answers(path, plan) == answers(path, plain)
    assert not calls and answers(path, fused) == answers(path, plain) and calls


def test_a_fusing_backend_that_no_number_of_rows_leads_to(tiny: Callable[[str], Path]) -> None:
    path = tiny("q3")
    fused, plain = plan_for(path, "fused"), plan_for(path, "plain")
    hidden = [Bucket(PlanEntry("linear"), fused.choice("linear"), (1, 8))]
    before = [Bucket(PlanEntry("linear"), plain.choice("linear"), rows) for rows in ((1, 4), (5, 8))]
    plan = replace(plain, buckets=(*plain.buckets, *hidden, *before))
    assert plan.fused(hidden[0].choice) == BOTH
    assert answers(path, plan) == answers(path, plain)


@pytest.mark.parametrize(("most", "largest"), [(4, 4), (15, 14)])
def test_backends_by_shape_and_rows(
    most: int,
    largest: int,
    tiny: Callable[[str], Path],
    calls: Counter[tuple[bool, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """14 tokens of prompts, then 4 rows: the plan's border holds, not the sixteen rows that the backend would like."""
    path = tiny("q3")
    fused, plain = plan_for(path, "fused"), plan_for(path, "plain")
    model, seen = read_model_config(str(path)), set[int]()
    inner = FusedTorchLinear.forward_fused  # counts by now

    def forward(self: Any, x: torch.Tensor, *rest: Any) -> Any:
        seen.add(x.shape[0])
        return inner(self, x, *rest)

    monkeypatch.setattr(FusedTorchLinear, "forward_fused", forward)
    entry = PlanEntry("linear", shape=(2 * model.intermediate_size, model.hidden_size))
    buckets = (Bucket(entry, fused.choice("linear"), (1, most)), Bucket(entry, plain.choice("linear")))
    assert answers(path, replace(plain, buckets=(*plain.buckets, *buckets))) == answers(path, plain)
    assert set(calls) == {(True, True)} and max(seen) == largest


@pytest.mark.slow
def test_two_ranks(tiny: Callable[[str], Path]) -> None:
    path = tiny("q3")
    plans = [replace(plan_for(path, linear), tp_size=2) for linear in ("plain", "fused")]
    assert answers(path, plans[0], tp_size=2) == answers(path, plans[1], tp_size=2)


def test_a_norm_behind_an_all_reduce_stays_with_it(tiny: Callable[[str], Path]) -> None:
    plan = replace(plan_for(tiny("q3"), "fused"), tp_size=2)
    assert plan.fused(plan.choice("linear")) == {"act_and_mul"}


def test_of_several_backends_the_one_for_few_rows_is_asked() -> None:
    few, many = FusedTorchLinear(None), FusedTorchLinear(None)  # type: ignore[arg-type]
    weight, x = torch.randn(6, 4), torch.randn(2, 4)
    linear = LinearRouter([LinearRoute(few, 3, BOTH), LinearRoute(many, fused=frozenset())], {})
    prepared = linear.prepare_weights(weight)
    assert [linear.fused_rows(prepared, *form) for form in ((True, False), (True, True))] == [3, 3]
    out, total = linear.forward_fused(x, prepared, None, None, True)
    assert total is None and torch.equal(out, few.forward_fused(x, weight, None, None, True)[0])
    turned = LinearRouter([LinearRoute(many, 3), LinearRoute(few, fused=BOTH)], {})
    assert turned.fused_rows(turned.prepare_weights(weight), True, False) == 0
    only = LinearRouter([LinearRoute(few, fused=frozenset({"act_and_mul"}))], {})
    prepared = only.prepare_weights(weight)
    assert [only.fused_rows(prepared, *form) for form in ((False, True), (True, True))] == [16, 0]
