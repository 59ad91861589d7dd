"""kv:cuda against plain indexing: the CUDA sources in the simulator, the Triton ones in the interpreter."""

from __future__ import annotations

import mmap
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl_cuda.kv_cpp import CudaKVKernels
from minisgl_cuda.kv_cpp.launch import BLOCK, UNITS, shape_for, unit_of

if torch.cuda.is_available():
    pytest.skip("the simulator and the interpreter stand in for a GPU; here is one", allow_module_level=True)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@pytest.fixture(params=["cpp", "triton"])
def kv(request: pytest.FixtureRequest, kv_setup: Any) -> Any:
    if request.param == "cpp":
        return request.getfixturevalue("simulated_kv")
    pytest.importorskip("triton", reason="the Triton variant needs triton")
    from minisgl_cuda.kv_triton import TritonKVKernels

    return TritonKVKernels(kv_setup())


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def pool(pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A layer in the middle of (2, L, P + 1, S, K, D), all NaN."""
    return torch.full((2, 3, pages, page_size, kv_heads, head_dim), torch.nan, dtype=dtype)[:, 1]


def check_store(kv: Any, k: torch.Tensor, v: torch.Tensor, caches: torch.Tensor, out_loc: torch.Tensor) -> None:
    expected = caches.flatten(1, 2).clone()
    expected[0, out_loc.long()], expected[1, out_loc.long()] = k.to(caches.dtype), v.to(caches.dtype)
    kv.store(caches[0], caches[1], k, v, out_loc)
    assert torch.equal(bits(caches.flatten(1, 2)), bits(expected))


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype"),
    [(1, 128, BF16), (3, 80, BF16), (8, 64, F32), (2, 5, BF16), (1, 3, F32), (1, 1, F16)],
)
@pytest.mark.parametrize("tokens", [1, 9])
def test_store_of_views_into_a_pool(kv: Any, kv_heads: int, head_dim: int, dtype: torch.dtype, tokens: int) -> None:
    wide = torch.randn(tokens, 4 * kv_heads, head_dim).to(dtype)  # q, k and v of the merged projection
    k, v = wide[:, 2 * kv_heads : 3 * kv_heads], wide[:, 3 * kv_heads :]
    caches = pool(5, 4, kv_heads, head_dim, dtype)
    check_store(kv, k, v, caches, torch.randperm(20)[:tokens].to(torch.int32))


def test_store_of_many_rows_fills_blocks(simulated_kv: CudaKVKernels, simulated: Any) -> None:
    caches = pool(601, 1, 1, 128, BF16)
    k, v = torch.randn(2, 600, 1, 128).to(BF16)
    check_store(simulated_kv, k, v, caches, torch.randperm(601)[:600].to(torch.int32))
    ((name, shape),) = simulated.seen
    assert name == "minisgl::kv_store<minisgl::Bytes16>" and shape == (300, 32, 2)


def test_store_converts_to_the_dtype_of_the_pool(kv: Any) -> None:
    k, v = torch.randn(2, 3, 2, 8)
    check_store(kv, k, v, pool(4, 1, 2, 8, BF16), torch.tensor([3, 0, 2], dtype=torch.int32))


def test_store_of_nothing(kv: Any) -> None:
    check_store(kv, *torch.randn(2, 0, 2, 8), pool(4, 1, 2, 8, F32), torch.empty(0, dtype=torch.int32))


@pytest.mark.parametrize("width", [1024, 240, 7])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_index_gives_zeros_for_the_ids_of_other_ranks(kv: Any, width: int, dtype: torch.dtype) -> None:
    table = torch.randn(12, width).to(dtype)
    table[0] = torch.nan  # must not leak into foreign ids; rows 10 and 11 are padding
    ids = torch.tensor([25, 20, 29, 19, 30, 0, -1, -(2**31), 2**31 - 1], dtype=torch.int32)
    out = kv.index(table, ids, 20, 10)
    expected = torch.zeros(9, width, dtype=dtype)
    expected[:3] = table[[5, 0, 9]]
    assert torch.equal(bits(out), bits(expected))


def test_index_reads_strided_rows(kv: Any) -> None:
    table = torch.randn(6, 40)[:, :20]
    assert torch.equal(kv.index(table, torch.tensor([5, 0], dtype=torch.int32), 0, 6), table[[5, 0]])


def test_index_of_nothing(kv: Any) -> None:
    assert kv.index(torch.randn(3, 8), torch.empty(0, dtype=torch.int32), 0, 3).shape == (0, 8)


def test_vector_and_scalar_paths_are_chosen_by_every_address(simulated_kv: CudaKVKernels, simulated: Any) -> None:
    rows = torch.randn(4, 1, 24)
    slot = torch.tensor([1], dtype=torch.int32)
    for k in (rows[:1, :, :8], rows[:1, :, 1:9]):  # the second begins 4 bytes behind a multiple of 16
        check_store(simulated_kv, k, rows[:1, :, 8:16], pool(2, 1, 1, 8, F32), slot)
    assert [name for name, _ in simulated.seen] == [
        "minisgl::kv_store<minisgl::Bytes16>",
        "minisgl::kv_store<uint32_t>",
    ]


def sparse(slots: int, width: int) -> torch.Tensor:
    """(slots, 1, 1, width) bf16 zeros; only pages that are touched take memory."""
    memory = mmap.mmap(-1, slots * width * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(memory, dtype=BF16).view(slots, 1, 1, width)


def test_case_70_huge_offsets(kv: Any) -> None:
    slots, width = 2_200_000, 1024  # 4.5 GB: offsets past 2**32
    k_cache, v_cache = sparse(slots, width), sparse(slots, width)
    k, v = torch.randn(2, 1, 1, width).to(BF16)
    last = torch.tensor([slots - 1], dtype=torch.int32)
    kv.store(k_cache, v_cache, k, v, last)
    for cache, row in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[-1], row)
        assert not cache[0].any() and not cache[slots - 2].any()
        assert torch.equal(kv.index(cache.view(slots, width), last, 0, slots), row.view(1, width))


def test_kernels_are_one_operation_to_a_recorder(kv: Any) -> None:
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    cache, table = torch.zeros(2, 4, 1, 1, 8), torch.randn(4, 8)
    k, ids = torch.randn(1, 1, 8), torch.tensor([2], dtype=torch.int32)
    with Recorder():
        kv.store(cache[0], cache[1], k, k, ids)
        out = kv.index(table, ids, 0, 4)
    assert [name for name in seen if name.startswith("minisgl_cuda.kv_")] == seen[-3:-2] + seen[-1:]
    assert torch.equal(cache[0, 2], k) and torch.equal(out[0], table[2])


def test_each_backend_uses_its_own_launcher(simulated_kv: CudaKVKernels, simulated: Any, kv_setup: Any) -> None:
    class Other:
        launches = 0

        def prepare(self, *kernel: Any) -> Any:
            return self.launch

        def launch(self, *args: Any) -> None:
            self.launches += 1

    other = Other()
    backend = CudaKVKernels(kv_setup(), launcher=other)
    table, ids = torch.randn(4, 8), torch.tensor([2], dtype=torch.int32)
    backend.index(table, ids, 0, 4)
    assert (other.launches, simulated.seen) == (1, [])
    simulated_kv.index(table, ids, 0, 4)
    assert (other.launches, len(simulated.seen)) == (1, 1)


@given(st.lists(st.integers(0, 2**45), min_size=1))
def test_a_unit_divides_all_and_no_wider_one_does(numbers: list[int]) -> None:
    unit = unit_of(reduce(or_, numbers))
    assert all(n % unit == 0 for n in numbers)
    assert not any(all(n % wider == 0 for n in numbers) for wider in UNITS if wider > unit)


@given(st.integers(1, 2**31), st.integers(1, 10_000))
def test_a_shape_covers_every_row_once(rows: int, units: int) -> None:
    shape = shape_for(rows, units)
    assert (shape.blocks - 1) * shape.rows < rows <= shape.blocks * shape.rows < 2**31 + BLOCK
    assert shape.lanes % 32 == 0 and shape.lanes * shape.rows <= BLOCK
    assert shape.lanes - 32 < units or shape.lanes == 32


@settings(max_examples=60, deadline=None)
@given(shared=st.integers(0, 300), tails=st.tuples(st.integers(0, 80), st.integers(0, 80)))
def test_match_len(shared: int, tails: tuple[int, int]) -> None:
    from minisgl_cuda.kv_host import match_function, numpy_match_len

    random = np.random.default_rng(shared)
    prefix = random.integers(0, 2**31, shared, dtype=np.int32)
    a = np.concatenate((prefix, random.integers(0, 10, tails[0], dtype=np.int32)))
    b = np.concatenate((prefix, random.integers(10, 20, tails[1], dtype=np.int32)))
    for match_len in (match_function(), numpy_match_len):
        assert match_len(a, b) == shared and match_len(a, a.copy()) == len(a)
