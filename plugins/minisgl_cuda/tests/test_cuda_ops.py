"""ops:cuda against the core's composed definitions. On a GPU both variants run as they are; on a CPU the Triton one is
interpreted and the CUDA C++ one simulated.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl_core.builtin.ops import ComposedOps
from minisgl_core.builtin.platform import CudaPlatform
from minisgl_core.plugin_api import RopeStoreArgs, SampleArgs
from minisgl_cuda.ops_cpp import CompiledOps

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
pytestmark = [pytest.mark.gpu] if ON_GPU else []

Backends = Callable[..., tuple[Any, ComposedOps]]


class IndexedStore:
    """k and v rows to slots, by plain indexing."""

    def store(self, k_cache: Any, v_cache: Any, k: Any, v: Any, out_loc: Any) -> None:
        k_cache.view(-1, *k_cache.shape[2:])[out_loc.long()] = k.to(k_cache.dtype)
        v_cache.view(-1, *v_cache.shape[2:])[out_loc.long()] = v.to(v_cache.dtype)


def setup_of(q_heads: int, kv_heads: int, head_dim: int) -> Any:
    comm = SimpleNamespace(all_reduce=lambda x: x.mul_(2))  # two ranks that hold the same
    platform = CudaPlatform(0) if ON_GPU else None
    return SimpleNamespace(
        q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, kv=IndexedStore(), comm=comm, platform=platform
    )


def triton_backend(setup: Any) -> Any:
    pytest.importorskip("triton", reason="the Triton variant needs triton")
    from minisgl_cuda.ops import CudaOps

    return CudaOps(setup)


@pytest.fixture(params=["cpp", "triton"])
def backends(request: pytest.FixtureRequest) -> Backends:
    """``(ours, composed)`` of one variant, for these heads."""
    if request.param == "cpp" and ON_GPU and shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")

    def make(q_heads: int = 1, kv_heads: int = 1, head_dim: int = 8) -> tuple[Any, ComposedOps]:
        setup = setup_of(q_heads, kv_heads, head_dim)
        if request.param == "triton":
            return triton_backend(setup), ComposedOps(setup)
        launcher = None if ON_GPU else request.getfixturevalue("simulated_ops")
        return CompiledOps(setup, launcher=launcher), ComposedOps(setup)

    return make


def sampler() -> tuple[Any, ComposedOps]:
    """The only variant that samples."""
    setup = setup_of(1, 1, 8)
    return triton_backend(setup), ComposedOps(setup)


def rounds_exactly(ours: Any) -> bool:
    """Triton's interpreter cuts bfloat16 off instead of rounding."""
    return ON_GPU or isinstance(ours, CompiledOps)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance, rtol=tolerance)


NORM_SIZES = [(1, 1024), (3, 5), (17, 100), (2, 5120), (1, 2501)]  # the last has more than threads hold at once
ACT_SIZES = [(1, 1536), (3, 5), (2, 4104)]
if ON_GPU:
    NORM_SIZES += [(8192, 1024), (700, 5120), (257, 2048), (300, 1001), (3, 40000)]
    ACT_SIZES += [(8192, 3072), (300, 17408), (1000, 100), (513, 768)]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("tokens", "width"), NORM_SIZES)
def test_norms(backends: Backends, dtype: torch.dtype, tokens: int, width: int) -> None:
    ours, composed = backends()
    if width > 8192 and not isinstance(ours, CompiledOps):
        pytest.skip("compiling takes Triton longer than the rest of the tests")
    x, residual = randn(tokens, width + 8, dtype=dtype)[:, :width], randn(tokens, width, dtype=dtype)
    weight = randn(width, dtype=dtype)
    close(ours.rms_norm(x, weight, 1e-6), composed.rms_norm(x, weight, 1e-6))
    for name in ("add_rms_norm", "allreduce_add_rms_norm"):
        expected = getattr(composed, name)(x.clone(), residual.clone(), weight, 1e-6)
        found = getattr(ours, name)(x.clone(), residual.clone(), weight, 1e-6)
        close(found[0], expected[0])
        close(found[1], expected[1])
        if rounds_exactly(ours):
            assert torch.equal(found[1], expected[1])


def test_norms_change_x_and_residual_in_place_and_nothing_else(backends: Backends) -> None:
    ours, composed = backends()
    wide = randn(3, 24)
    x, residual, weight = wide[:, 8:16], randn(3, 8), randn(8)
    expected, expected_residual = composed.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    outside = wide[:, [*range(8), *range(16, 24)]].clone()
    found, found_residual = ours.add_rms_norm(x, residual, weight, 1e-6)
    assert found is x and found_residual is residual
    close(x, expected)
    close(residual, expected_residual)
    assert torch.equal(wide[:, [*range(8), *range(16, 24)]], outside)


def test_norm_of_zeros_is_zero(backends: Backends) -> None:
    ours, _ = backends()
    assert not ours.rms_norm(torch.zeros(2, 64, device=DEVICE), randn(64), 1e-6).any()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("tokens", "width"), ACT_SIZES)
def test_act_and_mul(backends: Backends, dtype: torch.dtype, tokens: int, width: int) -> None:
    ours, composed = backends()
    x = randn(tokens, 2 * width, dtype=dtype)
    close(ours.act_and_mul(x), composed.act_and_mul(x))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy, inside the interpreter
def test_silu_of_large_gates(backends: Backends) -> None:
    ours, _ = backends()
    x = torch.tensor([[-200.0, -100.0, -80.0, 0.0, 80.0, 200.0] + 6 * [1.0]], device=DEVICE)
    close(ours.act_and_mul(x), torch.tensor([[0.0, 0.0, 0.0, 0.0, 80.0, 200.0]], device=DEVICE))


HEADS = [((16, 8), 128, 128), ((3, 1), 80, 32), ((5, 5), 64, 64), ((2, 1), 96, 96), ((2, 2), 256, 64), ((1, 1), 40, 6)]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "dim", "rotary"), HEADS)
def test_qk_norm_rope_store(
    backends: Backends, dtype: torch.dtype, norm: bool, heads: tuple[int, int], dim: int, rotary: int
) -> None:
    q_heads, kv_heads = heads
    ours, composed = backends(q_heads, kv_heads, dim)
    pages, size = 6, 4
    positions, slots = [0, 7, 8, 9, 49], [3, 23, 0, 11, 12]
    if ON_GPU:
        pages, positions = 300, [i % 50 for i in range(1000)]
        slots = torch.randperm(pages * size)[: len(positions)].tolist()
    qkv = randn(len(positions), (q_heads + 2 * kv_heads) * dim, dtype=dtype)
    weights = (randn(dim, dtype=dtype), randn(dim, dtype=dtype)) if norm else (None, None)
    angles = randn(50, rotary // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    where, out_loc = (torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in (positions, slots))
    results = []
    for ops in (ours, composed):
        caches = [torch.full((pages, size, kv_heads, dim), 9.0, dtype=dtype, device=DEVICE) for _ in range(2)]
        q, k, v = ops.qk_norm_rope_store(qkv.clone(), RopeStoreArgs(*weights, 1e-6, table, *caches), where, out_loc)
        results.append((q, k, v, *caches))
    for found, expected in zip(*results, strict=True):
        close(found, expected)
    assert torch.equal(results[0][4], results[1][4])  # values are moved, not computed


def test_qkv_and_caches_may_have_any_stride(backends: Backends) -> None:
    ours, composed = backends(2, 1, 8)
    qkv, angles = randn(2, 40), randn(9, 4)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    where, out_loc = (torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in ([8, 2], [5, 0]))
    results = []
    for ops in (ours, composed):
        pool = torch.full((2, 3, 2, 1, 16), 9.0, device=DEVICE)[..., :8]  # layers of both caches, heads in wider rows
        row = qkv.clone()[:, :32]
        row = row if ops is ours else row.contiguous()
        q, k, v = ops.qk_norm_rope_store(row, RopeStoreArgs(None, None, 1e-6, table, pool[0], pool[1]), where, out_loc)
        results.append((q, k, v, pool))
    for found, expected in zip(*results, strict=True):
        close(found, expected)


def test_no_tokens(backends: Backends) -> None:
    ours, _ = backends(2, 1, 8)
    empty, none = torch.empty(0, 32, device=DEVICE), torch.empty(0, dtype=torch.int32, device=DEVICE)
    assert ours.rms_norm(empty, randn(32), 1e-6).shape == (0, 32)
    assert ours.add_rms_norm(empty, empty.clone(), randn(32), 1e-6)[0].shape == (0, 32)
    assert ours.act_and_mul(empty).shape == (0, 16)
    caches = randn(2, 1, 1, 1, 8)
    q, k, v = ours.qk_norm_rope_store(empty, RopeStoreArgs(None, None, 1e-6, randn(4, 8), *caches), none, none)
    assert (q.shape, k.shape, v.shape) == ((0, 2, 8), (0, 1, 8), (0, 1, 8))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [7, 4096, 9001])
def test_greedy_and_random_rows_equal_the_composed_sampler(dtype: torch.dtype, vocab: int) -> None:
    ours, composed = sampler()
    logits = randn(6, vocab, dtype=dtype) * 2
    params = args(6, temperature=[0.0, 1.0, 0.7, 2.0, 0.0, 0.01], seed=[1, 2, 3, 4, 5, -6])
    assert torch.equal(ours.sample(logits, params, "greedy"), composed.sample(logits, params, "greedy"))
    assert torch.equal(ours.sample(logits, params, "random"), composed.sample(logits, params, "random"))


@pytest.mark.parametrize("vocab", [50, 4200])
def test_filtered_rows_equal_the_composed_sampler(vocab: int) -> None:
    ours, composed = sampler()
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
    ours, composed = sampler()
    rows = 64 if ON_GPU else 8
    logits = torch.zeros(rows, 40, device=DEVICE)
    logits[:, [30, 4, 17, 9]] = 1.0
    for given in ({"top_k": 2}, {"top_p": 0.3}, {"top_p": 0.02}, {"min_p": 0.9}):
        params = args(rows, temperature=1.0, seed=list(range(rows)), **given)
        found = ours.sample(logits, params, "filtered")
        assert torch.equal(found, composed.sample(logits, params, "filtered"))
        assert set(found.tolist()) <= {4, 9, 17, 30} or given == {"top_p": 0.3}


def test_case_45_nan_rows_give_minus_one_and_ties_the_lowest_id() -> None:
    ours, _ = sampler()
    logits = torch.zeros(3, 5000, device=DEVICE)
    logits[0, [4999, 17, 4500]] = 5.0
    logits[1, 4700] = torch.nan
    for mode in ("greedy", "random", "filtered"):
        assert ours.sample(logits, args(3), mode).tolist() == [17, -1, 0]  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy, inside the interpreter
def test_case_38_tiny_temperatures_take_the_maximum() -> None:
    ours, _ = sampler()
    logits = torch.tensor([[2.875, 2.955, 11.0625]] * 3, dtype=torch.bfloat16, device=DEVICE)
    assert ours.sample(logits, args(3, temperature=[1e-5, 1e-8, 1e-38]), "random").tolist() == [2, 2, 2]
