"""kv:cpu and kv:torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_cpu_sim.native.kv import NativeKV
from minisgl_cpu_sim.pure.kv import TorchKV

pytestmark = pytest.mark.parametrize("kv", [NativeKV(SimpleNamespace()), TorchKV(SimpleNamespace())])  # type: ignore[arg-type]


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 128), (3, 80), (8, 64), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 16])
def test_store_writes_its_slots_only(kv: Any, kv_heads: int, head_dim: int, dtype: torch.dtype, page_size: int) -> None:
    tokens = 9
    k_cache = torch.full((8 * 16 // page_size, page_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    v_cache = k_cache.clone()
    wide = torch.randn(tokens, 3 * kv_heads, head_dim).to(dtype)  # k and v are views of the merged projection
    k, v = wide[:, kv_heads : 2 * kv_heads], wide[:, 2 * kv_heads :]
    out_loc = torch.randperm(8 * 16)[:tokens].to(torch.int32)
    kv.store(k_cache, v_cache, k, v, out_loc)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        slots = cache.flatten(0, 1)
        assert torch.equal(slots[out_loc.long()], rows)
        others = torch.ones(len(slots), dtype=torch.bool)
        others[out_loc.long()] = False
        assert slots[others].isnan().all()


def test_store_converts_to_the_dtype_of_the_pool(kv: Any) -> None:
    k_cache = torch.zeros(4, 2, 1, 8, dtype=torch.bfloat16)
    v_cache = k_cache.clone()
    k, v = torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    kv.store(k_cache, v_cache, k, v, torch.tensor([7, 0], dtype=torch.int32))
    assert torch.equal(k_cache.flatten(0, 1)[[7, 0]], k.bfloat16())
    assert torch.equal(v_cache.flatten(0, 1)[[7, 0]], v.bfloat16())


def test_store_of_large_rows_in_parallel(kv: Any) -> None:
    torch.set_num_threads(2)
    k_cache, v_cache = torch.zeros(2, 300, 4, 128), torch.zeros(2, 300, 4, 128)
    k, v, out_loc = torch.randn(500, 4, 128), torch.randn(500, 4, 128), torch.randperm(600)[:500].to(torch.int32)
    kv.store(k_cache, v_cache, k, v, out_loc)
    torch.set_num_threads(1)
    assert torch.equal(k_cache.flatten(0, 1)[out_loc.long()], k)
    assert torch.equal(v_cache.flatten(0, 1)[out_loc.long()], v)


def test_index_gives_zeros_for_the_ids_of_other_ranks(kv: Any) -> None:
    table = torch.randn(10, 7)
    table[0] = torch.nan  # must not leak into foreign ids
    out = kv.index(table, torch.tensor([25, 20, 29, 19, 30, 0, 2**31 - 1], dtype=torch.int32), 20, 10)
    assert torch.equal(out[[0, 2]], table[[5, 9]]) and out[1].isnan().all()
    assert torch.equal(out[3:], torch.zeros(4, 7))


def test_index_skips_padding_rows_of_the_table(kv: Any) -> None:
    table = torch.randn(8, 4)
    assert torch.equal(
        kv.index(table, torch.tensor([5, 6], dtype=torch.int32), 0, 6), torch.stack((table[5], table[5] * 0))
    )


@settings(max_examples=60, deadline=None)
@given(shared=st.integers(0, 300), tails=st.tuples(st.integers(0, 80), st.integers(0, 80)))
def test_match_len(kv: Any, shared: int, tails: tuple[int, int]) -> None:
    random = np.random.default_rng(shared)
    prefix = random.integers(0, 2**31, shared, dtype=np.int32)
    a = np.concatenate((prefix, random.integers(0, 10, tails[0], dtype=np.int32)))
    b = np.concatenate((prefix, random.integers(10, 20, tails[1], dtype=np.int32)))
    assert kv.match_len(a, b) == shared
    assert kv.match_len(a, a.copy()) == len(a)
