"""A plan may name several backends of one entry, each for its own numbers of rows; the engine calls the right one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.core import Batch, SamplingParams
from minisgl_core.engine import EngineConfig
from minisgl_core.engine.dispatch import AttentionDispatcher, Route
from minisgl_core.engine.linear_router import LinearRoute, LinearRouter
from minisgl_core.engine.plan_resolution import make_plan
from minisgl_core.llm import LLM
from minisgl_core.modelconfig import read_model_config
from minisgl_core.registry import Bucket, Plan, PlanEntry

pytest.importorskip("minisgl_cpu_sim")


class Keeps:
    """A linear backend that keeps weights as they are."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.calls, self.closed = factor, [], 0

    def prepare_weights(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def weight_of(self, weights: torch.Tensor) -> torch.Tensor:
        return weights

    def forward(self, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.calls.append(x.shape[0])
        return self.factor * torch.nn.functional.linear(x, weights, bias)

    def close(self) -> None:
        self.closed += 1


class Repacks(Keeps):
    """Stores weights transposed."""

    def prepare_weights(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.T.contiguous()

    def weight_of(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.T

    def forward(self, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, weights.T, bias)


def test_linear_is_chosen_by_shape_and_rows():
    few, many, other = Keeps(), Keeps(), Keeps()
    linear = LinearRouter([LinearRoute(other)], {(6, 4): [LinearRoute(few, 2), LinearRoute(many)]})
    weight, elsewhere = torch.randn(6, 4), torch.randn(5, 4)
    prepared, prepared_elsewhere = linear.prepare_weights(weight), linear.prepare_weights(elsewhere)
    for rows in (1, 2, 3, 40):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(linear.forward(x, prepared), x @ weight.T)
        torch.testing.assert_close(linear.forward(x, prepared_elsewhere), x @ elsewhere.T)
    assert (few.calls, many.calls, other.calls) == ([1, 2], [3, 40], [1, 2, 3, 40])
    linear.close()
    assert (few.closed, many.closed, other.closed) == (1, 1, 1)


def test_backends_that_keep_a_weight_share_it_and_one_that_repacks_has_its_own():
    few, many, again = Keeps(), Repacks(), Keeps()
    linear = LinearRouter([LinearRoute(few, 1), LinearRoute(many, 8), LinearRoute(again)], {})
    weight = torch.randn(6, 4)
    prepared = linear.prepare_weights(weight)
    addresses = [item.data_ptr() for item in prepared.weights]
    assert addresses[0] == addresses[2] == weight.data_ptr() != addresses[1]
    assert linear.weight_of(prepared) is weight
    for rows in (1, 8, 9):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(linear.forward(x, prepared), x @ weight.T)


def test_one_backend_in_two_routes_prepares_a_weight_once():
    ends, middle = Repacks(), Keeps()
    linear = LinearRouter([LinearRoute(ends, 1), LinearRoute(middle, 8), LinearRoute(ends)], {})
    prepared = linear.prepare_weights(torch.randn(6, 4))
    assert prepared.weights[0] is prepared.weights[2]


class Notified:
    """An attention backend that remembers its calls."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, ...]] = []

    def init_capture_graph(self, max_seq_len: int, bs_list: tuple[int, ...]) -> None:
        self.sizes.append(bs_list)


def test_each_attention_backend_gets_the_graph_sizes_that_it_will_serve():
    low, high, never = Notified(), Notified(), Notified()
    routes = [Route(low, 16, False, 4), Route(high, 16, True, 8), Route(low, 16, False, 16), Route(never, 16, False)]
    dispatcher = AttentionDispatcher({"prefill": [Route(low, 16, False)], "decode": routes})
    dispatcher.init_capture_graph(64, (1, 2, 4, 8, 16))
    assert (low.sizes, high.sizes, never.sizes) == ([(1, 2, 4, 16)], [(8,)], [])


PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13], [14, 15, 16, 17, 18]]
SETTINGS: dict[str, Any] = {
    "dtype": torch.float32,
    "device": "cpu",
    "max_running_req": 4,
    "num_page_override": 256,
    "max_seq_len_override": 64,
    "progress": False,
}


def plan_for(path: Path, **settings: Any) -> Plan:
    backends = {"attention": "torch", "kv": "torch", "ops": "composed", "linear": "plain", "graph": "emulated"}
    config = EngineConfig(str(path), backends=backends, **{**SETTINGS, **settings})
    return make_plan(config, read_model_config(str(path)))


def split(plan: Plan, entry: PlanEntry, limit: int, name: str, factory: str) -> Plan:
    """Up to ``limit`` rows go to another backend."""
    default = plan.choice(entry.role, phase=entry.phase)
    other = replace(default, name=name, factory=factory)
    return replace(plan, buckets=(*plan.buckets, Bucket(entry, other, (1, limit))))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Rows of every decode batch that a backend was asked to attend to, by class."""
    from minisgl_cpu_sim.native.attention import NativeAttention
    from minisgl_cpu_sim.pure.attention import TorchAttention

    seen: dict[str, list[int]] = {"torch": [], "cpu": []}
    for name, cls in (("torch", TorchAttention), ("cpu", NativeAttention)):

        def forward(self: Any, q: Any, k: Any, v: Any, layer: int, batch: Batch, inner: Any = cls.forward, name=name):
            if layer == 0 and batch.phase == "decode":
                seen[name].append(batch.padded_size)
            return inner(self, q, k, v, layer, batch)

        monkeypatch.setattr(cls, "forward", forward)
    return seen


@pytest.mark.parametrize("graph", [0, 4])
def test_decode_batches_of_a_plan_with_two_backends_go_to_the_right_one(
    graph: int, tiny: Callable[[str], Path], counted: dict[str, list[int]]
):
    path, params = tiny("q3"), SamplingParams(max_tokens=6, ignore_eos=True)
    plan = plan_for(path, cuda_graph_max_bs=graph)
    two = split(
        plan, PlanEntry("attention", phase="decode"), 2, "cpu", "minisgl_cpu_sim.native.attention:NativeAttention"
    )
    answers = []
    for each in (plan, two):
        with LLM(path, plan=each.to_json(), cuda_graph_max_bs=graph, **SETTINGS) as llm:
            answers.append([item["token_ids"] for item in llm.generate(PROMPTS, params, progress=False)])
            answers[-1].append(llm.generate(PROMPTS[0], params, progress=False)[0]["token_ids"])
            if each is plan:
                assert counted["cpu"] == []
                counted["torch"].clear()
    assert answers[0] == answers[1]
    assert set(counted["torch"]) == {4} and set(counted["cpu"]) <= {1, 2} and counted["cpu"]


def test_a_plan_with_two_linear_backends_answers_the_same(tiny: Callable[[str], Path]):
    path, params = tiny("q3"), SamplingParams(max_tokens=6, ignore_eos=True)
    plan = plan_for(path)
    two = split(plan, PlanEntry("linear"), 3, "cpu", "minisgl_cpu_sim.native.linear:NativeLinear")
    answers = []
    for each in (plan, two):
        with LLM(path, plan=each.to_json(), **SETTINGS) as llm:
            assert isinstance(llm.engine.ctx.linear, LinearRouter) == (each is two)
            answers.append([item["token_ids"] for item in llm.generate(PROMPTS, params, progress=False)])
    assert answers[0] == answers[1]
