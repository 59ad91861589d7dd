"""Cases of the role ``moe``. Shapes: T tokens, k experts per token, E experts, I expert width, N hidden width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from minisgl_core.plugin_api import Caps, MoESetup
from minisgl_core.registry.query import Need

from .attention_cases import DTYPES
from .case import collect
from .compare import close, expect
from .reference import experts
from .rig import dtype_named
from .subject import names_of
from .trial import Draw, Tensors, Trial, TrialCase

if TYPE_CHECKING:
    from .rig import Rig
    from .subject import Subject

__all__ = ["TOLERANCE", "MoECase", "moe_cases"]

TOLERANCE: Final = {"float32": 1e-4, "float16": 6e-3, "bfloat16": 4e-2}
"""Of a value's usual size: the activation and each expert's result are rounded, and the results may cancel."""

Routing = Literal["random", "one_expert", "few_experts", "padding", "all_padding"]


@dataclass(frozen=True, kw_only=True, repr=False)
class MoECase(TrialCase):
    """One call of the experts of the second of two layers.

    ``routing``: with ``one_expert`` and ``few_experts`` the others get no token; with ``padding`` some ids are -1, all
    of the last rows'.
    """

    tokens: int = 17
    experts: int = 8
    top_k: int = 2
    hidden: int = 128
    width: int = 96
    routing: Routing = "random"

    def need(self, rig: Rig) -> Need:
        return Need(device=rig.facts, dtype=self.dtype, capture=self.how == "replay")

    def build(self, subject: Subject, rig: Rig, box: Caps | None) -> Any:
        setup = MoESetup(
            device=rig.device,
            dtype=dtype_named(self.dtype),
            num_experts=self.experts,
            top_k=self.top_k,
            hidden_size=self.hidden,
            intermediate_size=self.width,
            num_layers=2,
            max_tokens=self.tokens,
        )
        return subject.build(setup, box)

    def trial(self, backend: Any, rig: Rig) -> Trial:
        return _Experts(self, backend, rig)


class _Experts(Trial):
    LAYER = 1

    def __init__(self, case: MoECase, backend: Any, rig: Rig) -> None:
        self._c, self._backend = case, backend
        draw, dtype = Draw(rig, case.seed + 1), dtype_named(case.dtype)
        self._truth = []
        self._weights = []
        for layer in range(2):
            w13 = draw.normal(case.experts, 2 * case.width, case.hidden, dtype=dtype, scale=case.hidden**-0.5)
            w2 = draw.normal(case.experts, case.hidden, case.width, dtype=dtype, scale=case.width**-0.5)
            self._truth.append((w13, w2))
            self._weights.append(backend.prepare_weights(layer, w13.clone(), w2.clone()))

    def draw(self, draw: Draw) -> Tensors:
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
        return {"x": x, "topk_ids": ids, "topk_weights": weights}

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        weights = self._weights[self.LAYER]
        return (self._backend.forward(inputs["x"], inputs["topk_ids"], inputs["topk_weights"], weights, self.LAYER),)

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        (out,), x, ids = outputs, inputs["x"], inputs["topk_ids"]
        expect(out.dtype == x.dtype, f"the result is {out.dtype}, expected {x.dtype}")
        want = experts(x, ids, inputs["topk_weights"], *self._truth[self.LAYER])
        idle = (ids == -1).all(-1)
        expect(not out[idle].any(), "a row without experts is not zero")
        size = max(0.2, float(want.square().mean().sqrt()))
        return close(out, want, "the experts' sum", scale=size, tolerance=TOLERANCE[self._c.dtype])


def moe_cases(subject: Subject, rig: Rig, quick: bool) -> list[MoECase]:
    """Every claim at its ends, and what lies just beyond."""
    return collect(subject, rig, lambda box: _of_box(box, quick), _beyond)


def _of_box(box: Caps, quick: bool) -> Iterator[MoECase]:
    dtypes = names_of(box.dtypes, DTYPES)
    for dtype in dtypes:
        base = MoECase(name=dtype, dtype=dtype)

        def case(what: str, base: MoECase = base, **changes: Any) -> MoECase:
            return replace(base, name=f"{base.dtype}/{what}", **changes)

        yield case("forward")
        yield case("padding", routing="padding")
        if quick and dtype != dtypes[0]:
            continue
        for tokens in (1, 2, 130) if quick else (1, 2, 3, 16, 64, 130, 1025):
            yield case(f"tokens={tokens}", tokens=tokens)
        yield case("one_expert", routing="one_expert", top_k=1)
        yield case("few_experts", routing="few_experts")
        yield case("all_padding", routing="all_padding")
        yield case("experts=60,top_k=4", experts=60, top_k=4)
        yield case("experts=1", experts=1, top_k=1)
        yield case("top_k=experts", experts=4, top_k=4)
        yield case("width=48", width=48, hidden=64)
        if not quick:
            yield case("qwen3-30b-a3b,tp=4", experts=128, top_k=8, hidden=2048, width=192, tokens=33)
        yield case("growth", how="growth")
        if box.graph != "never":
            yield case("replay", how="replay")
            yield case("replay,padding", how="replay", routing="padding")


def _beyond(box: Caps) -> Iterator[MoECase]:
    dtypes = names_of(box.dtypes, DTYPES)
    base = MoECase(name="outside", outside=True, dtype=(dtypes or DTYPES)[0])
    for dtype in DTYPES:
        if dtype not in dtypes:
            yield replace(base, name=f"outside/dtype={dtype}", dtype=dtype)
    if box.graph == "never":
        yield replace(base, name="outside/replay", how="replay")
