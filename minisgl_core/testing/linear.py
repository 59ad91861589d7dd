"""Checks of the role ``linear``: y (M, N) = x (M, K) @ weight (N, K).T + bias (N,)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from minisgl_core.plugin_api import AddNorm, Caps, LinearSetup
from minisgl_core.registry.query import Requirement

from .check_run import CallCheck, CheckRun, Draw, Tensors, spread
from .compare import close, expect, same
from .device_fixture import dtype_named
from .ops_reference import rms_norm, silu_mul
from .reference import product_slack, silu_mul_slack

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest
    from .device_fixture import DeviceFixture

__all__ = ["FusedLinearCheck", "LinearCheck"]


@dataclass(frozen=True, kw_only=True, repr=False)
class LinearCheck(CallCheck):
    """One product. ``strided``: x is a view of wider rows."""

    m: int = 17
    n: int = 96
    k: int = 64
    bias: bool = False
    strided: bool = False
    tolerance: float = 0.0
    """The declared tolerance: |y - y64| / (|x| |W|^T)."""

    def requirement(self, fixture: DeviceFixture) -> Requirement:
        return Requirement(device=fixture.facts, dtype=self.dtype, capture=self.how == "replay", format="plain")

    def build(self, under_test: BackendUnderTest, fixture: DeviceFixture, caps: Caps | None) -> Any:
        return under_test.build(LinearSetup(fixture.device, dtype_named(self.dtype), self.m, fixture.platform), caps)

    def check_run(self, backend: Any, fixture: DeviceFixture) -> CheckRun:
        return _Product(self, backend, fixture)


class _Product(CheckRun):
    def __init__(self, check: LinearCheck, backend: Any, fixture: DeviceFixture) -> None:
        self._c, self._backend = check, backend
        draw = Draw(fixture, check.seed + 1)
        self._weight = draw.normal(check.n, check.k, dtype=dtype_named(check.dtype), scale=check.k**-0.5)
        self._prepared = backend.prepare_weights(self._weight.clone())
        if (kept := backend.weight_of(self._prepared)) is not None:
            same(kept, self._weight, "weight_of")

    def resize(self, rows: int) -> None:
        self._c = replace(self._c, m=rows)

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
        return close(outputs[0], want, "the product", slack=self._slack(inputs["x"]))

    def _slack(self, x: torch.Tensor) -> torch.Tensor | float:
        """The error that the declared tolerance allows in each element of the product."""
        return product_slack(x, self._weight, self._c.tolerance) if self._c.tolerance else 0.0


@dataclass(frozen=True, kw_only=True, repr=False)
class FusedLinearCheck(LinearCheck):
    """A product with a fused add and norm before it (``norm``), silu-and-mul behind it (``act``), or both."""

    norm: bool = False
    act: bool = False
    eps: float = 1e-6

    def check_run(self, backend: Any, fixture: DeviceFixture) -> CheckRun:
        return _Fused(self, backend, fixture)


class _Fused(_Product):
    _c: FusedLinearCheck

    def __init__(self, check: FusedLinearCheck, backend: Any, fixture: DeviceFixture) -> None:
        super().__init__(check, backend, fixture)
        rows = backend.fused_rows(self._prepared, check.norm, check.act)
        expect(isinstance(rows, int) and rows >= 0, f"fused_rows is {rows!r}, not a number of rows")

    def draw(self, draw: Draw) -> Tensors:
        c, dtype, inputs = self._c, dtype_named(self._c.dtype), super().draw(draw)
        if c.norm:
            residual = draw.normal(c.m, c.k, dtype=dtype, scale=3.0)
            inputs["residual"] = spread(residual) if c.strided else residual
            inputs["norm_weight"] = draw.normal(c.k, dtype=dtype)
        return inputs

    def call(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        norm = AddNorm(inputs["residual"], inputs["norm_weight"], self._c.eps) if self._c.norm else None
        out, total = self._backend.forward_fused(inputs["x"], self._prepared, inputs.get("bias"), norm, self._c.act)
        expect((total is not None) == self._c.norm, "total is returned with a norm, and only then")
        return (out,) if total is None else (out, total)

    def judge(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> float:
        c, x, worst = self._c, inputs["x"].to(torch.float64), 0.0
        if c.norm:
            total = (inputs["x"].to(torch.float32) + inputs["residual"].to(torch.float32)).to(inputs["x"].dtype)
            worst = close(outputs[1], total.to(torch.float64), "x + residual")
            x = rms_norm(total, inputs["norm_weight"], c.eps)
        want = x @ self._weight.to(torch.float64).T
        if c.bias:
            want += inputs["bias"].to(torch.float64)
        slack = self._slack(x)
        if c.act:
            want, slack = silu_mul(want), silu_mul_slack(want, slack)
        expect(outputs[0].dtype == inputs["x"].dtype, f"the result is {outputs[0].dtype}")
        return max(worst, close(outputs[0], want, "the product", slack=slack))
