"""moe:cpu and moe:torch against a loop over tokens in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_cpu_sim.native.moe import NativeMoE
from minisgl_cpu_sim.pure.moe import TorchMoE

both = pytest.mark.parametrize("executor", [NativeMoE, TorchMoE])


def reference(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights.double(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            if expert >= 0:
                gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
                out[token] += share * (w2[expert].double() @ (gate * torch.sigmoid(gate) * up))
    return out


def check(
    executor: Any, x: torch.Tensor, ids: torch.Tensor, experts: int, inner: int, tolerance: float = 1e-5
) -> torch.Tensor:
    random = torch.Generator().manual_seed(experts)
    width = x.shape[1]
    w13 = (torch.randn(experts, 2 * inner, width, generator=random) / width**0.5).to(x.dtype)
    w2 = (torch.randn(experts, width, inner, generator=random) / inner**0.5).to(x.dtype)
    weights = torch.rand(ids.shape, generator=random)
    moe = executor(SimpleNamespace(dtype=x.dtype))
    before = x.clone()
    out: torch.Tensor = moe.forward(x, ids, weights, moe.prepare_weights(0, w13, w2), 0)
    assert out.dtype == x.dtype and torch.equal(x, before)
    torch.testing.assert_close(out.double(), reference(x, ids, weights, w13, w2), atol=tolerance, rtol=tolerance)
    return out


def some_ids(tokens: int, top_k: int, experts: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(experts, generator=random)[:top_k] for _ in range(tokens)]
    return torch.stack(rows).to(torch.int32)


@both
@pytest.mark.parametrize(
    ("ids", "experts"),
    [
        (torch.zeros(4, 1, dtype=torch.int32), 1),
        (torch.full((7, 1), 4, dtype=torch.int32), 5),
        (some_ids(9, 4, 60), 60),
        (some_ids(1, 8, 128), 128),
        (some_ids(90, 2, 3), 3),
    ],
    ids=["one expert", "all to the last", "60 experts", "1 token, 128 experts", "long groups"],
)
def test_case_72_any_grouping_is_the_dense_sum(executor: Any, ids: torch.Tensor, experts: int) -> None:
    check(executor, torch.randn(len(ids), 40), ids, experts, inner=24)


@both
def test_case_72_an_expert_without_tokens_is_never_read(executor: Any) -> None:
    moe = executor(SimpleNamespace(dtype=torch.float32))
    w13, w2 = torch.randn(4, 16, 12), torch.randn(4, 12, 8)
    w13[[0, 1, 3]], w2[[0, 1, 3]] = torch.nan, torch.nan
    ids = torch.full((5, 1), 2, dtype=torch.int32)
    assert moe.forward(torch.randn(5, 12), ids, torch.ones(5, 1), (w13, w2), 0).isfinite().all()


@both
def test_case_74_the_input_is_not_changed_even_as_a_view(executor: Any) -> None:
    wide = torch.randn(6, 50)
    check(executor, wide[:, :40], some_ids(6, 2, 4), 4, inner=16)


@both
def test_case_75_padding_contributes_nothing(executor: Any) -> None:
    ids = some_ids(8, 4, 60)
    ids[2], ids[5, 1:], ids[7] = -1, -1, -1
    x = torch.randn(8, 40)
    x[7] = torch.nan  # nothing of a padding row is read
    moe = executor(SimpleNamespace(dtype=torch.float32))
    w13, w2, weights = torch.randn(60, 48, 40), torch.randn(60, 40, 24), torch.rand(8, 4)
    weights[7] = torch.nan
    out = moe.forward(x, ids, weights, (w13, w2), 0)
    assert torch.equal(out[[2, 7]], torch.zeros(2, 40))
    real = [0, 1, 3, 4, 5, 6]
    expected = reference(x[real], ids[real], weights[real], w13, w2)
    torch.testing.assert_close(out[real].double(), expected, atol=1e-3, rtol=1e-5)


@both
def test_only_padding(executor: Any) -> None:
    out = check(executor, torch.randn(3, 16), torch.full((3, 2), -1, dtype=torch.int32), 4, inner=8)
    assert torch.equal(out, torch.zeros(3, 16))


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(executor: Any, dtype: torch.dtype) -> None:
    check(executor, torch.randn(30, 64).to(dtype), some_ids(30, 2, 4), 4, inner=48, tolerance=2e-2)


@both
@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 70),
    experts=st.integers(1, 12),
    top_k=st.integers(1, 4),
    width=st.integers(1, 90),
    inner=st.integers(1, 90),
)
def test_any_shape(executor: Any, tokens: int, experts: int, top_k: int, width: int, inner: int) -> None:
    ids = some_ids(tokens, min(top_k, experts), experts, seed=tokens)
    check(executor, torch.randn(tokens, width), ids, experts, inner, tolerance=1e-4)


def test_more_tokens_than_pass_through_together() -> None:
    setup: Any = SimpleNamespace(dtype=torch.float32)
    x, w13, w2 = torch.randn(2100, 8), torch.randn(3, 8, 8), torch.randn(3, 8, 4)
    ids, weights = torch.randint(-1, 3, (2100, 2)).to(torch.int32), torch.rand(2100, 2)
    native, plain = (kind(setup).forward(x, ids, weights, (w13, w2), 0) for kind in (NativeMoE, TorchMoE))
    torch.testing.assert_close(native, plain, atol=1e-4, rtol=1e-4)
