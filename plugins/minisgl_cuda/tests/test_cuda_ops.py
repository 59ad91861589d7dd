"""ops:cuda against the core's composed definitions: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="ops:cuda needs triton")

from minisgl_core.builtin.ops import ComposedOps
from minisgl_core.plugin_api import SampleArgs
from minisgl_cuda.ops import CudaOps

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
pytestmark = [pytest.mark.gpu] if ON_GPU else []


class IndexedStore:
    """k and v rows to slots, by plain indexing."""

    def store(self, k_cache: Any, v_cache: Any, k: Any, v: Any, out_loc: Any) -> None:
        k_cache.view(-1, *k_cache.shape[2:])[out_loc.long()] = k.to(k_cache.dtype)
        v_cache.view(-1, *v_cache.shape[2:])[out_loc.long()] = v.to(v_cache.dtype)


def backends(q_heads: int = 1, kv_heads: int = 1, head_dim: int = 8) -> tuple[CudaOps, ComposedOps]:
    comm = SimpleNamespace(all_reduce=lambda x: x.mul_(2))  # two ranks that hold the same
    setup: Any = SimpleNamespace(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, kv=IndexedStore(), comm=comm)
    return CudaOps(setup), ComposedOps(setup)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("tokens", "width"), [(1, 1024), (3, 5), (17, 100)])
def test_norms(dtype: torch.dtype, tokens: int, width: int) -> None:
    ours, composed = backends()
    x, residual = randn(tokens, width + 4, dtype=dtype)[:, :width], randn(tokens, width, dtype=dtype)
    weight = randn(width, dtype=dtype)
    close(ours.rms_norm(x, weight, 1e-6), composed.rms_norm(x, weight, 1e-6))
    for name in ("add_rms_norm", "allreduce_add_rms_norm"):
        expected = getattr(composed, name)(x.clone(), residual.clone(), weight, 1e-6)
        found = getattr(ours, name)(x.clone(), residual.clone(), weight, 1e-6)
        close(found[0], expected[0])
        close(found[1], expected[1])  # not bit for bit: the interpreter cuts bfloat16 off instead of rounding


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("tokens", "width"), [(1, 1536), (3, 5)])
def test_act_and_mul(dtype: torch.dtype, tokens: int, width: int) -> None:
    ours, composed = backends()
    x = randn(tokens, 2 * width, dtype=dtype)
    close(ours.act_and_mul(x), composed.act_and_mul(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "dim", "rotary"), [((16, 8), 128, 128), ((3, 1), 80, 32), ((5, 5), 64, 64)])
def test_qk_norm_rope_store(dtype: torch.dtype, norm: bool, heads: tuple[int, int], dim: int, rotary: int) -> None:
    q_heads, kv_heads = heads
    ours, composed = backends(q_heads, kv_heads, dim)
    tokens, pages, size = 5, 6, 4
    qkv = randn(tokens, (q_heads + 2 * kv_heads) * dim, dtype=dtype)
    weights = (randn(dim, dtype=dtype), randn(dim, dtype=dtype)) if norm else (None, None)
    angles = randn(50, rotary // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([0, 7, 8, 9, 49], dtype=torch.int32, device=DEVICE)
    out_loc = torch.tensor([3, 23, 0, 11, 12], dtype=torch.int32, device=DEVICE)
    results = []
    for ops in (ours, composed):
        caches = [torch.full((pages, size, kv_heads, dim), 9.0, dtype=dtype, device=DEVICE) for _ in range(2)]
        q, k, v = ops.qk_norm_rope_store(qkv.clone(), *weights, 1e-6, positions, table, *caches, out_loc)
        results.append((q, k, v, *caches))
    for found, expected in zip(*results, strict=True):
        close(found, expected)


def args(rows: int, **given: Any) -> SampleArgs:
    """Parameters as the engine passes them: columns of one table, so with a stride."""
    values = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3} | given
    table = torch.zeros(rows, 6, dtype=torch.int32)
    floats = table.view(torch.float32)
    for column, name in ((0, "temperature"), (2, "top_p"), (3, "min_p")):
        floats[:, column] = torch.tensor(values[name], dtype=torch.float32)
    table[:, 1], table[:, 4] = torch.tensor(values["top_k"]), torch.tensor(values["seed"])
    table, floats = table.to(DEVICE), floats.to(DEVICE)
    positions = torch.arange(100, 100 + rows, dtype=torch.int32, device=DEVICE)
    return SampleArgs(floats[:, 0], table[:, 1], floats[:, 2], floats[:, 3], table[:, 4], table[:, 5], positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 4096, 9001])
def test_greedy_and_random_rows_equal_the_composed_sampler(dtype: torch.dtype, vocab: int) -> None:
    ours, composed = backends()
    logits = randn(6, vocab, dtype=dtype) * 2
    params = args(6, temperature=[0.0, 1.0, 0.7, 2.0, 0.0, 0.01], seed=[1, 2, 3, 4, 5, -6])
    assert torch.equal(ours.sample(logits, params, "greedy"), composed.sample(logits, params, "greedy"))
    assert torch.equal(ours.sample(logits, params, "random"), composed.sample(logits, params, "random"))


@pytest.mark.parametrize("vocab", [50, 4200])
def test_filtered_rows_equal_the_composed_sampler(vocab: int) -> None:
    ours, composed = backends()
    logits = randn(8, vocab) * 2
    params = args(
        8,
        temperature=[1.0, 1.0, 0.8, 1.5, 1.0, 0.0, 1.0, 1.0],
        top_k=[5, 0, 20, 0, 40, 5, 1, 2**30],
        top_p=[1.0, 0.5, 0.7, 1.0, 0.9, 0.5, 1.0, 1e-9],
        min_p=[0.0, 0.0, 0.0, 0.2, 0.05, 0.1, 0.0, 0.0],
        seed=list(range(8)),
    )
    for turn in range(4 if ON_GPU else 1):
        params = params._replace(positions=params.positions + turn)
        assert torch.equal(ours.sample(logits, params, "filtered"), composed.sample(logits, params, "filtered"))


def test_equal_logits_at_the_threshold_follow_the_rules_for_ties() -> None:
    ours, composed = backends()
    rows = 64 if ON_GPU else 8
    logits = torch.zeros(rows, 40, device=DEVICE)
    logits[:, [30, 4, 17, 9]] = 1.0
    for given in ({"top_k": 2}, {"top_p": 0.3}, {"top_p": 0.02}, {"min_p": 0.9}):
        params = args(rows, temperature=1.0, seed=list(range(rows)), **given)
        found = ours.sample(logits, params, "filtered")
        assert torch.equal(found, composed.sample(logits, params, "filtered"))
        assert set(found.tolist()) <= {4, 9, 17, 30} or given == {"top_p": 0.3}


def test_case_45_nan_rows_give_minus_one_and_ties_the_lowest_id() -> None:
    ours, _ = backends()
    logits = torch.zeros(3, 5000, device=DEVICE)
    logits[0, [4999, 17, 4500]] = 5.0
    logits[1, 4700] = torch.nan
    for mode in ("greedy", "random", "filtered"):
        assert ours.sample(logits, args(3), mode).tolist() == [17, -1, 0]  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy, inside the interpreter
def test_case_38_tiny_temperatures_take_the_maximum() -> None:
    ours, _ = backends()
    logits = torch.tensor([[2.875, 2.955, 11.0625]] * 3, dtype=torch.bfloat16, device=DEVICE)
    assert ours.sample(logits, args(3, temperature=[1e-5, 1e-8, 1e-38]), "random").tolist() == [2, 2, 2]
