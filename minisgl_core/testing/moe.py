"""Checks of the role ``moe``. Shapes: T tokens, k experts per token, E experts, I expert width, N hidden width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import torch

from minisgl_core.plugin_api import Caps, MoESetup
from minisgl_core.registry.query import Requirement

from .attention_checks import DTYPES
from .backend_under_test import names_of
from .check_run import CallCheck, CheckRun, Draw, Tensors
from .collect import collect
from .compare import close, expect
from .device_fixture import dtype_named
from .endurance import STEPS
from .reference import experts, experts_slack

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest
    from .check import Check
    from .device_fixture import DeviceFixture

__all__ = ["TOLERANCE", "MoECheck", "moe_checks"]

TOLERANCE: Final = {"float32": 1e-4, "float16": 6e-3, "bfloat16": 4e-2}
"""Tolerance relative to the usual size of a value: the activation and the result of each expert are rounded, and
results may cancel.
"""

JUDGED: Final = 16
"""In repeated calls every 16th row is judged: among millions of rounded sums, some exceed the tolerance."""

Routing = Literal["random", "one_expert", "few_experts", "padding", "all_padding"]


@dataclass(frozen=True, kw_only=True, repr=False)
class MoECheck(CallCheck):
    """One call of the experts of the second of two layers; with ``both_layers`` also one of the first, before it.

    ``routing``: with ``one_expert`` and ``few_experts`` the others get no token; with ``padding`` some ids are -1,
    among them all of the last rows, and their weights and inputs are NaN. ``gate``, ``up``: the usual size of the
    values that are activated, and of those they are multiplied with.
    """

    tokens: int = 17
    experts: int = 8
    top_k: int = 2
    hidden: int = 128
    width: int = 96
    routing: Routing = "random"
    both_layers: bool = False
    gate: float = 1.0
    up: float = 1.0
    tolerance: float = 0.0
    """The declared tolerance of each product: |y - y64| / (|x| |W|^T)."""

    def siblings(self) -> tuple[Self, ...]:
        smaller = replace(self, experts=self.experts - 1, hidden=self.hidden // 2, width=self.width // 2)
        return (*super().siblings(), smaller)

    def requirement(self, fixture: DeviceFixture) -> Requirement:
        return Requirement(device=fixture.facts, dtype=self.dtype, capture=self.how == "replay")

    def build(self, under_test: BackendUnderTest, fixture: DeviceFixture, caps: Caps | None) -> Any:
        setup = MoESetup(
            device=fixture.device,
            dtype=dtype_named(self.dtype),
            num_experts=self.experts,
            top_k=self.top_k,
            hidden_size=self.hidden,
            intermediate_size=self.width,
            num_layers=2,
            max_tokens=self.tokens,
            platform=fixture.platform,
        )
        return under_test.build(setup, caps)

    def check_run(self, backend: Any, fixture: DeviceFixture) -> CheckRun:
        return _Experts(self, backend, fixture)


class _Experts(CheckRun):
    def __init__(self, check: MoECheck, backend: Any, fixture: DeviceFixture) -> None:
        self._c, self._backend = check, backend
        self._layers = (0, 1) if check.both_layers else (1,)
        draw, dtype = Draw(fixture, check.seed + 1), dtype_named(check.dtype)
        self._truth = []
        self._weights = []
        for layer in range(2):
            w13 = draw.normal(check.experts, 2 * check.width, check.hidden, dtype=dtype, scale=check.hidden**-0.5)
            w13[:, : check.width] *= check.gate
            w13[:, check.width :] *= check.up
            w2 = draw.normal(check.experts, check.hidden, check.width, dtype=dtype, scale=check.width**-0.5)
            self._truth.append((w13, w2))
            self._weights.append(backend.prepare_weights(layer, w13.clone(), w2.clone()))

    def resize(self, rows: int) -> None:
        self._c = replace(self._c, tokens=rows)

    def draw(self, draw: Draw) -> Tensors:
        """x, ids and weights of each layer that is called; ``x1`` is layer 1's."""
        return {f"{name}{layer}": value for layer in self._layers for name, value in self._draw_one(draw).items()}

    def _draw_one(self, draw: Draw) -> Tensors:
        c = self._c
        x = draw.normal(c.tokens, c.hidden, dtype=dtype_named(c.dtype))
        choices = {"one_expert": 1, "few_experts": c.top_k}.get(c.routing, c.experts)
        first = draw.order(c.experts)[:choices]
        ids = torch.stack([first[draw.order(choices)[torch.arange(c.top_k) % choices]] for _ in range(c.tokens)])
        ids = ids.to(torch.int32)
        if c.routing == "padding":
            ids[::3, -1] = -1
            ids[-2:] = -1
        elif c.routing == "all_padding":
            ids[:] = -1
        weights = draw.normal(c.tokens, c.top_k).abs() + 0.1  # they need not add up to one
        x[(ids == -1).all(-1)] = torch.nan
        weights[ids == -1] = torch.nan
        return {"x": x, "topk_ids": ids, "topk_weights": weights}

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        return tuple(
            self._backend.forward(*_of_layer(inputs, layer), self._weights[layer], layer) for layer in self._layers
        )

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        return max(
            self._judge_one(*_of_layer(inputs, layer), layer, out)
            for layer, out in zip(self._layers, outputs, strict=True)
        )

    def _judge_one(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: int, out: torch.Tensor
    ) -> float:
        expect(out.dtype == x.dtype, f"the result is {out.dtype}, expected {x.dtype}")
        idle = (ids == -1).all(-1)
        expect(not out[idle].any(), "a row without experts is not zero")
        if self._c.how == "endurance":
            x, ids, weights, out = (each[::JUDGED] for each in (x, ids, weights, out))
        want = experts(x, ids, weights, *self._truth[layer])
        what = f"the experts' sum of layer {layer}" if self._c.both_layers else "the experts' sum"
        size = max(0.2, float(want.square().mean().sqrt()))
        lossy = self._c.tolerance
        slack = experts_slack(x, ids, weights, *self._truth[layer], lossy) if lossy else 0.0
        return close(out, want, what, scale=size, tolerance=TOLERANCE[self._c.dtype], slack=slack)


def _of_layer(inputs: Tensors, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return inputs[f"x{layer}"], inputs[f"topk_ids{layer}"], inputs[f"topk_weights{layer}"]


def moe_checks(under_test: BackendUnderTest, fixture: DeviceFixture, quick: bool) -> list[Check]:
    """Every claim at its limits, and values just outside."""
    return collect(under_test, fixture, lambda caps: _of_caps(caps, quick), _beyond)


def _of_caps(caps: Caps, quick: bool) -> Iterator[MoECheck]:
    dtypes = names_of(caps.dtypes, DTYPES)
    for dtype in dtypes:
        base = MoECheck(name=dtype, dtype=dtype, tolerance=caps.tolerance)

        def check(what: str, base: MoECheck = base, **changes: Any) -> MoECheck:
            return replace(base, name=f"{base.dtype}/{what}", **changes)

        yield check("forward")
        yield check("padding", routing="padding")
        if quick and dtype != dtypes[0]:
            continue
        for tokens in (1, 2, 130) if quick else (1, 2, 3, 16, 64, 130, 1025):
            yield check(f"tokens={tokens}", tokens=tokens)
        yield check("one_expert", routing="one_expert", top_k=1)
        yield check("one_expert,tokens=130", routing="one_expert", top_k=1, tokens=130)
        yield check("few_experts", routing="few_experts")
        yield check("all_padding", routing="all_padding")
        yield check("experts=60,top_k=4", experts=60, top_k=4)
        yield check("experts=1", experts=1, top_k=1)
        yield check("top_k=experts", experts=4, top_k=4)
        yield check("experts=128,top_k=8", experts=128, top_k=8, hidden=64, width=48)
        yield check("width=48", width=48, hidden=64)
        yield check("large_gates", gate=25.0, up=25.0)
        yield check("tiny_gates", gate=0.01, up=100.0)
        yield check("layers", both_layers=True)
        yield check("rewritten", how="rewritten")
        yield check("in_turn", how="in_turn")
        if not quick:
            yield check("qwen3-30b-a3b,tp=4", experts=128, top_k=8, hidden=2048, width=192, tokens=33)
        yield check("growth", how="growth")
        yield check("endurance", how="endurance", tokens=STEPS, hidden=64, width=48)
        if caps.graph != "never":
            yield check("replay", how="replay")
            yield check("replay,padding", how="replay", routing="padding")
            yield check("replay,layers", how="replay", both_layers=True)


def _beyond(caps: Caps) -> Iterator[MoECheck]:
    dtypes = names_of(caps.dtypes, DTYPES)
    base = MoECheck(name="outside", outside=True, dtype=(dtypes or DTYPES)[0])
    for dtype in DTYPES:
        if dtype not in dtypes:
            yield replace(base, name=f"outside/dtype={dtype}", dtype=dtype)
    if caps.graph == "never":
        yield replace(base, name="outside/replay", how="replay")
