"""ops:cpu against its definitions in float64, and against the core's composed operations."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.builtin.ops import ComposedOps
from minisgl_core.plugin_api import RopeStoreArgs
from minisgl_cpu_sim.native.ops import NativeOps
from minisgl_cpu_sim.pure.kv import TorchKV

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def setup(q_heads: int = 1, kv_heads: int = 1, head_dim: int = 8) -> Any:
    comm = SimpleNamespace(all_reduce=lambda x: x.mul_(2))  # two ranks that hold the same
    kv = TorchKV(SimpleNamespace())  # type: ignore[arg-type]
    return SimpleNamespace(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, kv=kv, comm=comm)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected.double(), atol=tolerance, rtol=tolerance)


def normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 576), (3, 5), (17, 100), (200, 300)])
def test_rms_norm(dtype: torch.dtype, tokens: int, width: int) -> None:
    x, weight = torch.randn(tokens, width + 4).to(dtype)[:, :width], torch.rand(width).to(dtype)
    close(NativeOps(setup()).rms_norm(x, weight, 1e-5), normalised(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 576), (3, 5), (17, 100)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_add_rms_norm(dtype: torch.dtype, tokens: int, width: int, ranks: int) -> None:
    x, residual, weight = torch.randn(tokens, width), torch.randn(tokens, width), torch.rand(width).to(dtype)
    x, residual = x.to(dtype), residual.to(dtype)
    total = (residual.double() + ranks * x.double()).to(dtype)
    ops = NativeOps(setup())
    add = ops.add_rms_norm if ranks == 1 else ops.allreduce_add_rms_norm
    out, summed = add(x.clone(), residual.clone(), weight, 1e-6)
    close(out, normalised(total, weight, 1e-6))
    assert torch.equal(summed, total)


def test_rms_norm_of_zeros_is_zero() -> None:
    out = NativeOps(setup()).rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6)
    assert torch.equal(out, torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1536), (3, 5), (70, 700)])
def test_act_and_mul(dtype: torch.dtype, tokens: int, width: int) -> None:
    x = (torch.randn(tokens, 2 * width) * 4).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    out = NativeOps(setup()).act_and_mul(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), F.silu(gate) * up, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_act_and_mul_at_the_ends_of_the_range() -> None:
    gate = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4, math.inf, math.nan]])
    out = NativeOps(setup()).act_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(out, F.silu(gate), atol=1e-30, rtol=1e-6, equal_nan=True)


def rope_case(
    dtype: torch.dtype, tokens: int, heads: tuple[int, int], head_dim: int, rotary: int, norm: bool, page_size: int
) -> None:
    """Compares q, k, v and both caches with a float64 computation; other slots keep their NaN."""
    random = torch.Generator().manual_seed(tokens + head_dim)
    q_heads, kv_heads = heads
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * head_dim, generator=random).to(dtype)
    q_weight, k_weight = (torch.rand(head_dim, generator=random).to(dtype) if norm else None for _ in range(2))
    positions = torch.randint(0, 50, (tokens,), generator=random).to(torch.int32)
    angles = torch.randn(50, rotary // 2, generator=random)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    slots = 6 * 16
    k_cache = torch.full((slots // page_size, page_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    v_cache = k_cache.clone()
    out_loc = torch.randperm(slots, generator=random)[:tokens].to(torch.int32)

    x = qkv.double().view(tokens, -1, head_dim)
    parts = list(x.split((q_heads, kv_heads, kv_heads), dim=1))
    cos, sin = (t.double()[positions.long(), None] for t in (angles.cos(), angles.sin()))
    for i, weight in enumerate((q_weight, k_weight)):
        if weight is not None:
            parts[i] = normalised(parts[i], weight, 1e-6)
        a, b, rest = parts[i].split((rotary // 2, rotary // 2, head_dim - rotary), dim=-1)
        parts[i] = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    ops = NativeOps(setup(q_heads, kv_heads, head_dim))
    out = ops.qk_norm_rope_store(
        qkv, RopeStoreArgs(q_weight, k_weight, 1e-6, cos_sin, k_cache, v_cache), positions, out_loc
    )
    for got, expected in zip(out, parts, strict=True):
        assert got.shape == expected.shape
        close(got, expected)
    for cache, row in ((k_cache, out[1]), (v_cache, out[2])):
        stored = cache.flatten(0, 1)
        assert torch.equal(stored[out_loc.long()], row)
        others = torch.ones(slots, dtype=torch.bool)
        others[out_loc.long()] = False
        assert stored[others].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (128, 128), (80, 80), (96, 96), (256, 256), (20, 20)])
def test_qk_norm_rope_store(dtype: torch.dtype, norm: bool, head_dim: int, rotary: int) -> None:
    rope_case(dtype, 9, (6, 2), head_dim, rotary, norm, page_size=16)


@pytest.mark.parametrize(("head_dim", "rotary"), [(128, 64), (80, 32), (20, 6)])
def test_case_14_dimensions_past_the_rotary_ones_stay(head_dim: int, rotary: int) -> None:
    rope_case(torch.float32, 5, (3, 1), head_dim, rotary, norm=False, page_size=1)


def test_rope_of_many_tokens_in_parallel() -> None:
    torch.set_num_threads(2)
    rope_case(torch.float32, 90, (9, 3), 64, 64, norm=True, page_size=16)
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("top_k", "renormalize", "expected"),
    [(2, False, [0.563021, 0.207124]), (2, True, [0.731059, 0.268941]), (1, True, [1.0])],
)
def test_case_71_norm_topk_prob(top_k: int, renormalize: bool, expected: list[float]) -> None:
    ids, weights = NativeOps(setup()).route(torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0]]), top_k, renormalize)
    assert ids.tolist() == [[0, 1][:top_k]] and ids.dtype == torch.int32
    torch.testing.assert_close(weights, torch.tensor([expected]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 128, 8), (50, 60, 4), (3, 1, 1), (2, 7, 7)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_route(dtype: torch.dtype, tokens: int, experts: int, top_k: int, renormalize: bool) -> None:
    random = torch.Generator().manual_seed(experts)
    order = torch.stack([torch.randperm(experts, generator=random) for _ in range(tokens)])
    logits = (order / 8).to(dtype)  # distinct in each row, in every dtype
    ids, weights = NativeOps(setup()).route(logits, top_k, renormalize)
    probs, expected = torch.softmax(logits.double(), -1).topk(top_k)
    assert torch.equal(ids.long(), expected)
    scale = probs.sum(-1, keepdim=True) if renormalize else 1.0
    torch.testing.assert_close(weights.double(), probs / scale, atol=1e-6, rtol=1e-6)


def test_route_gives_the_lower_expert_on_a_tie() -> None:
    ids, weights = NativeOps(setup()).route(torch.zeros(1, 6), 3, True)
    assert ids.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((1, 3), 1 / 3))


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 20),
    heads=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    head_dim=st.integers(1, 50).map(lambda half: 2 * half),
    norm=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_like_the_composed_operations(
    tokens: int, heads: tuple[int, int], head_dim: int, norm: bool, dtype: torch.dtype
) -> None:
    q_heads, kv_heads = heads
    random = torch.Generator().manual_seed(tokens)
    width = (q_heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(tokens, width, generator=random).to(dtype)
    q_weight, k_weight = (torch.rand(head_dim, generator=random).to(dtype) if norm else None for _ in range(2))
    positions = torch.randint(0, 9, (tokens,), generator=random).to(torch.int32)
    cos_sin = torch.rand(9, head_dim, generator=random)
    out_loc = torch.arange(tokens, dtype=torch.int32)
    facts = setup(q_heads, kv_heads, head_dim)
    results = []
    for ops in (NativeOps(facts), ComposedOps(facts)):
        k_cache, v_cache = (torch.zeros(5, 4, kv_heads, head_dim, dtype=dtype) for _ in range(2))
        out = ops.qk_norm_rope_store(
            qkv.clone(), RopeStoreArgs(q_weight, k_weight, 1e-6, cos_sin, k_cache, v_cache), positions, out_loc
        )
        results.append((*out, k_cache, v_cache))
    for native, composed in zip(*results, strict=True):
        close(native, composed)
