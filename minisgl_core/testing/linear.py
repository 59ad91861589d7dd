"""Cases of the role ``linear``: y (M, N) = x (M, K) @ weight (N, K).T + bias (N,)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from minisgl_core.plugin_api import Caps, LinearSetup
from minisgl_core.registry.query import Need

from .attention_cases import DTYPES
from .case import collect
from .compare import close, expect, same
from .rig import dtype_named
from .subject import names_of
from .trial import Draw, Tensors, Trial, TrialCase, spread

if TYPE_CHECKING:
    from .rig import Rig
    from .subject import Subject

__all__ = ["LinearCase", "linear_cases"]


@dataclass(frozen=True, kw_only=True, repr=False)
class LinearCase(TrialCase):
    """One product; ``strided``: x is a view of wider rows."""

    m: int = 17
    n: int = 96
    k: int = 64
    bias: bool = False
    strided: bool = False

    def need(self, rig: Rig) -> Need:
        return Need(device=rig.facts, dtype=self.dtype, capture=self.how == "replay", format="plain")

    def build(self, subject: Subject, rig: Rig, box: Caps | None) -> Any:
        return subject.build(LinearSetup(rig.device, dtype_named(self.dtype), self.m, rig.platform), box)

    def trial(self, backend: Any, rig: Rig) -> Trial:
        return _Product(self, backend, rig)


class _Product(Trial):
    def __init__(self, case: LinearCase, backend: Any, rig: Rig) -> None:
        self._c, self._backend = case, backend
        draw = Draw(rig, case.seed + 1)
        self._weight = draw.normal(case.n, case.k, dtype=dtype_named(case.dtype), scale=case.k**-0.5)
        self._prepared = backend.prepare_weights(self._weight.clone())
        same(backend.weight_of(self._prepared), self._weight, "weight_of")

    def draw(self, draw: Draw) -> Tensors:
        c, dtype = self._c, dtype_named(self._c.dtype)
        x = draw.normal(c.m, c.k, dtype=dtype)
        bias = {"bias": draw.normal(c.n, dtype=dtype)} if c.bias else {}
        return {"x": spread(x) if c.strided else x, **bias}

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        return (self._backend.forward(inputs["x"], self._prepared, inputs.get("bias")),)

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        want = inputs["x"].to(torch.float64) @ self._weight.to(torch.float64).T
        if self._c.bias:
            want += inputs["bias"].to(torch.float64)
        expect(outputs[0].dtype == inputs["x"].dtype, f"the result is {outputs[0].dtype}")
        return close(outputs[0], want, "the product")


def linear_cases(subject: Subject, rig: Rig, quick: bool) -> list[LinearCase]:
    """Rows around every size at which kernels change their way, and odd widths."""
    return collect(subject, rig, lambda box: _of_box(box, quick), _beyond)


def _of_box(box: Caps, quick: bool) -> Iterator[LinearCase]:
    dtypes = names_of(box.dtypes, DTYPES)
    for dtype in dtypes:
        base = LinearCase(name=dtype, dtype=dtype)

        def case(what: str, base: LinearCase = base, **changes: Any) -> LinearCase:
            return replace(base, name=f"{base.dtype}/{what}", **changes)

        for m in (1, 16, 17, 130) if quick else (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 32, 33, 64, 65, 130, 513):
            yield case(f"m={m}", m=m)
        if quick and dtype != dtypes[0]:
            continue
        yield case("bias", bias=True)
        yield case("bias,m=1", bias=True, m=1)
        yield case("strided", strided=True)
        for n, k in ((1, 64), (5, 576), (1000, 32), (96, 1536)):
            yield case(f"n={n},k={k}", n=n, k=k, m=3)
            yield case(f"n={n},k={k},m=40", n=n, k=k, m=40)
        yield case("rewritten", how="rewritten", bias=True)
        yield case("in_turn", how="in_turn")
        yield case("growth", how="growth")
        if box.graph != "never":
            for m in (1, 40):
                yield case(f"replay,m={m}", how="replay", m=m, bias=True)


def _beyond(box: Caps) -> Iterator[LinearCase]:
    dtypes = names_of(box.dtypes, DTYPES)
    base = LinearCase(name="outside", outside=True, dtype=(dtypes or DTYPES)[0])
    for dtype in DTYPES:
        if dtype not in dtypes:
            yield replace(base, name=f"outside/dtype={dtype}", dtype=dtype)
    if box.graph == "never":
        yield replace(base, name="outside/replay", how="replay")
