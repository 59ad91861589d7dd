"""Fused prologues and epilogues of products: for which numbers of rows they run, and that they give the same result."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from minisgl_core.builtin.linear import PlainLinear
from minisgl_core.builtin.ops import ComposedOps
from minisgl_core.core import Context
from minisgl_core.distributed import DistributedInfo
from minisgl_core.errors import BackendError
from minisgl_core.layers import GatedLinear, QKVLinear, RMSNorm
from minisgl_core.plugin_api import FUSABLE_OPS, AddNorm

HIDDEN, WIDTH, MOST = 6, 5, 3


class Ops(ComposedOps):
    def __init__(self) -> None:
        """Of one rank: needs no Setup."""

    def allreduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.add_rms_norm(x, residual, weight, eps)


class Fusing(PlainLinear):
    """Counts its fused calls, and wants up to MOST rows in each form but those in ``never``."""

    def __init__(self, *never: tuple[bool, bool]) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.never, self.seen = never, list[tuple[int, bool, bool]]()

    def fused_rows(self, weights: Any, norm: bool, act: bool) -> int:
        return 0 if (norm, act) in self.never else MOST

    def forward_fused(
        self, x: torch.Tensor, weights: Any, bias: torch.Tensor | None, norm: AddNorm | None, act: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.seen.append((x.shape[0], norm is not None, act))
        ops, total = Ops(), None
        if norm is not None:
            x, total = ops.add_rms_norm(x, *norm)
        out = self.forward(x, weights, bias)
        return (ops.act_and_mul(out) if act else out), total


def context(linear: Any, *fused: str) -> Context:
    return Context(
        config=None,  # type: ignore[arg-type]
        tp=DistributedInfo(0, 1),
        device=torch.device("cpu"),
        dtype=torch.float32,
        platform=None,  # type: ignore[arg-type]
        comm=None,  # type: ignore[arg-type]
        kv=None,  # type: ignore[arg-type]
        ops=Ops(),  # type: ignore[arg-type]
        linear=linear,
        fused=frozenset(fused),
    )


def made(kind: str, ctx: Context) -> tuple[Any, RMSNorm]:
    """A layer and its norm, fused as far as the context allows, with the same weights for every context."""
    layer: Any = (
        GatedLinear(ctx, HIDDEN, WIDTH, bias=True) if kind == "gated" else QKVLinear(ctx, HIDDEN, 2, 1, 2, True)
    )
    norm, draw = RMSNorm(ctx, HIDDEN, 1e-5), torch.Generator().manual_seed(3)
    for tensor in (layer.weight, layer.bias, norm.weight):
        tensor.normal_(generator=draw)
    layer.finish()
    layer.fuse_norm(norm)
    return layer, norm


def run(layer: Any, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm and the product, as a block of a model calls them."""
    out: tuple[torch.Tensor, torch.Tensor] = layer.forward_normed(*norm.forward_add(x, residual))
    return out


@pytest.mark.parametrize("kind", ["qkv", "gated"])
@pytest.mark.parametrize("rows", [0, 1, MOST, MOST + 1])
def test_products_are_fused_up_to_the_rows_that_the_backend_names(kind: str, rows: int) -> None:
    fusing = Fusing()
    layer, norm = made(kind, context(fusing, *FUSABLE_OPS))
    plain, same_norm = made(kind, context(PlainLinear(None)))  # type: ignore[arg-type]
    x, residual = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
    given = x.clone(), residual.clone()
    out, total = run(layer, norm, x, residual)
    wanted, sum_wanted = run(plain, same_norm, *given)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(total, sum_wanted)
    assert fusing.seen == ([(rows, True, kind == "gated")] if 0 < rows <= MOST else [])


@pytest.mark.parametrize("rows", [0, 1, MOST + 1])
def test_a_backend_that_fuses_nothing_is_never_called_for_it(rows: int) -> None:
    layer, norm = made("gated", context(PlainLinear(None)))  # type: ignore[arg-type]
    x = torch.randn(rows, HIDDEN)
    assert layer.forward(x).shape == run(layer, norm, x, x.clone())[0].shape == (rows, WIDTH)


def test_the_activation_is_fused_after_a_norm_that_is_not() -> None:
    x, residual = torch.randn(2, HIDDEN), torch.randn(2, HIDDEN)
    for fusing, fused in ((Fusing((True, True)), FUSABLE_OPS), (Fusing(), ("act_and_mul",))):
        layer, norm = made("gated", context(fusing, *fused))
        run(layer, norm, x, residual)
        assert fusing.seen == [(2, False, True)]


def test_the_norm_where_the_residual_begins_is_never_fused() -> None:
    fusing, x = Fusing(), torch.randn(1, HIDDEN)
    layer, norm = made("qkv", context(fusing))
    out, residual = layer.forward_normed(*norm.forward_add(x, None))
    torch.testing.assert_close(out, layer.forward(norm.forward(x)))
    assert residual is x and not fusing.seen
    _, fused_norm = made("qkv", context(fusing, *FUSABLE_OPS))
    with pytest.raises(AssertionError):
        fused_norm.forward_add(x, None)


def test_a_backend_fuses_nothing_that_the_plan_does_not_allow() -> None:
    fusing, x = Fusing(), torch.randn(1, HIDDEN)
    for kind in ("qkv", "gated"):
        layer, norm = made(kind, context(fusing))
        run(layer, norm, x, x.clone())
    assert not fusing.seen


@pytest.mark.parametrize("rows", [None, -1, 2.0, "16"])
def test_a_backend_that_returns_no_number_of_rows_is_named(rows: Any) -> None:
    class Odd(Fusing):
        def fused_rows(self, weights: Any, norm: bool, act: bool) -> Any:
            return rows

    with pytest.raises(BackendError, match=rf"fused_rows of .*Odd returned {re.escape(repr(rows))}"):
        made("gated", context(Odd(), *FUSABLE_OPS))


def test_a_backend_that_keeps_the_sum_to_itself_is_named() -> None:
    class Silent(Fusing):
        def forward_fused(self, *arguments: Any) -> Any:
            return super().forward_fused(*arguments)[0], None

    layer, norm = made("gated", context(Silent(), *FUSABLE_OPS))
    with pytest.raises(BackendError, match=r"forward_fused of .*Silent returned no sum"):
        run(layer, norm, torch.randn(2, HIDDEN), torch.randn(2, HIDDEN))
