"""kv:cuda on a GPU: both variants against plain indexing, huge pools, graphs, programmatic dependent launches."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from minisgl_core.builtin.platform import CudaPlatform
from minisgl_core.plugin_api import KVSetup
from minisgl_cuda.kv_cpp import CudaKVKernels
from minisgl_cuda.launch import CompiledLauncher

pytestmark = pytest.mark.gpu

VARIANTS = ["cpp", "cpp without dependent launches", "triton"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INT32 = torch.int32


@pytest.fixture(scope="module")
def platform() -> Iterator[CudaPlatform]:
    platform = CudaPlatform(0)
    platform.activate()
    yield platform
    platform.close()


@pytest.fixture(scope="module", params=VARIANTS)
def kv(request: pytest.FixtureRequest, platform: CudaPlatform) -> Iterator[Any]:
    setup = KVSetup(platform.device, torch.bfloat16, torch.bfloat16, 1, 8, 128, platform)
    if request.param == "triton":
        pytest.importorskip("triton", reason="the Triton variant needs triton")
        from minisgl_cuda.kv_triton import TritonKVKernels

        backend: Any = TritonKVKernels(setup)
    else:
        if shutil.which("nvcc") is None:
            pytest.skip("needs nvcc")
        launcher = None if request.param == "cpp" else CompiledLauncher(platform, dependent=False)
        backend = CudaKVKernels(setup, launcher=launcher)
    yield backend
    backend.close()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def slots_of(count: int, pool: int) -> torch.Tensor:
    return torch.randperm(pool, device="cuda")[:count].to(INT32)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 128), (1, 128), (3, 80), (4, 64), (2, 5), (1, 1), (16, 256)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store(kv: Any, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    for tokens in (0, 1, 7, 256, 5000):
        for page_size in (1, 16):
            shape = (2, 3, 6000 // page_size, page_size, kv_heads, head_dim)
            caches = torch.full(shape, torch.nan, device="cuda", dtype=dtype)[:, 1]
            expected = caches.clone().flatten(1, 2)
            wide = torch.randn(tokens, 4 * kv_heads, head_dim, device="cuda").to(dtype)
            k, v = wide[:, 2 * kv_heads : 3 * kv_heads], wide[:, 3 * kv_heads :]
            out_loc = slots_of(tokens, expected.shape[1])
            expected[0, out_loc.long()], expected[1, out_loc.long()] = k, v
            kv.store(caches[0], caches[1], k, v, out_loc)
            assert torch.equal(bits(caches.flatten(1, 2)), bits(expected)), (tokens, page_size)


def test_store_converts_to_the_dtype_of_the_pool(kv: Any) -> None:
    caches = torch.zeros(2, 9, 1, 2, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 3, 2, 64, device="cuda")
    kv.store(caches[0], caches[1], k, v, torch.tensor([8, 0, 4], dtype=INT32, device="cuda"))
    assert torch.equal(caches[:, [8, 0, 4], 0], torch.stack((k, v)).bfloat16())


@pytest.mark.parametrize("width", [1024, 5120, 240, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_index(kv: Any, width: int, dtype: torch.dtype) -> None:
    table = torch.randn(1003, width, device="cuda").to(dtype)
    table[0] = torch.nan  # must not leak into foreign ids; rows from 1000 on are padding
    for tokens in (0, 1, 9, 5000):
        ids = torch.randint(4500, 6500, (tokens,), device="cuda", dtype=INT32)
        ids[:6] = torch.tensor([5000, 5999, 6000, 4999, -(2**31), 2**31 - 1], dtype=INT32, device="cuda")[:tokens]
        local = ids.long() - 5000
        mine = (local >= 0) & (local < 1000)
        expected = table[local.clamp(0, 999)].masked_fill(~mine[:, None], 0)
        assert torch.equal(bits(kv.index(table, ids, 5000, 1000)), bits(expected)), tokens


def test_case_70_huge_offsets(kv: Any, platform: CudaPlatform) -> None:
    slots, width = 2_200_000, 1024
    if platform.free_bytes() < 10 * 2**30:
        pytest.skip("needs 10 GiB of free GPU memory")
    caches = torch.zeros(2, slots, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 8, 128, device="cuda", dtype=torch.bfloat16)
    at = [slots - 1, 1_500_000]
    out_loc = torch.tensor(at, device="cuda", dtype=INT32)
    kv.store(caches[0], caches[1], k, v, out_loc)
    for cache, rows in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[at, 0], rows)
        assert not cache[0].any() and int(cache.view(slots, width)[:, 0].count_nonzero()) == 2
        assert torch.equal(kv.index(cache.view(slots, width), out_loc, 0, slots), rows.view(2, width))


def test_inside_a_graph(kv: Any, platform: CudaPlatform) -> None:
    caches = torch.zeros(2, 300, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.zeros(2, 64, 8, 128, device="cuda", dtype=torch.bfloat16)
    out_loc = torch.zeros(64, dtype=INT32, device="cuda")
    table = torch.randn(100, 1024, device="cuda", dtype=torch.bfloat16)
    source, scratch = torch.randn(2, 4096, device="cuda")

    def step() -> torch.Tensor:
        scratch.zero_()  # nodes that are no kernels: a memset, a copy
        scratch.copy_(source)
        kv.store(caches[0], caches[1], k, v, out_loc)
        return kv.index(table, out_loc, 50, 50)

    step()
    platform.synchronize()
    graph, out, _ = platform.capture(step, None)
    for _ in range(5):
        k.normal_(), v.normal_(), caches.zero_()
        out_loc.copy_(slots_of(64, 300))
        graph.replay()
        assert torch.equal(caches[:, out_loc.long(), 0], torch.stack((k, v)))
        local = out_loc.long() - 50
        mine = (local >= 0) & (local < 50)
        assert torch.equal(out, table[local.clamp(0, 49)].masked_fill(~mine[:, None], 0))
    graph.close()


@pytest.mark.parametrize("captured", [False, True])
def test_kernels_in_a_row_see_each_others_writes(kv: Any, platform: CudaPlatform, captured: bool) -> None:
    """Each kernel may start before the last has ended; none may read too early, or overwrite what is still read."""
    caches = torch.zeros(2, 4096, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    flat = caches[0].view(4096, 1024)
    order = slots_of(4096, 4096)
    start = torch.randn(4096, 8, 128, device="cuda", dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        rows = start
        for i in range(20):  # round and round through the same cache, in another order each time
            where = order.roll(i)
            kv.store(caches[0], caches[1], rows, rows, where)
            rows = kv.index(flat, where, 0, 4096).view(4096, 8, 128)
        return rows

    assert torch.equal(step(), start)
    if captured:
        platform.synchronize()
        graph, out, _ = platform.capture(step, None)
        for _ in range(5):
            start.normal_()
            graph.replay()
            assert torch.equal(out, start)
        graph.close()
