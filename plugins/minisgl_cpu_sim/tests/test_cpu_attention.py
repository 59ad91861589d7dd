"""attention:cpu and attention:torch against attention's definition in float64, over a pool poisoned with NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.plugin_api import LayerFacts
from minisgl_cpu_sim.native.attention import NativeAttention
from minisgl_cpu_sim.pure.attention import TorchAttention

BACKENDS = [NativeAttention, TorchAttention]
RAGGED = (1, 2, 15, 16, 17, 1100)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
PLAIN = LayerFacts(scale=0.11)

both = pytest.mark.parametrize("backend", BACKENDS)


def check(
    backend: Any, pool: Any, q_lens: tuple[int, ...], facts: LayerFacts = PLAIN, tolerance: float | None = None
) -> None:
    q = pool.randn(sum(q_lens), pool.q_heads, pool.head_dim).to(pool.dtype)
    out = pool.run(backend, q, pool.batch(q_lens), facts)
    assert out.dtype == pool.dtype and out.shape == q.shape
    tolerance = tolerance or TOLERANCE[pool.dtype]
    torch.testing.assert_close(out.double(), pool.expected(q, q_lens, facts), atol=tolerance, rtol=tolerance)


@both
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_case_68_short_and_split_sequences(backend: Any, paged: Callable[..., Any], page_size: int, phase: str) -> None:
    pool = paged(RAGGED, 4, 2, 64, page_size)
    q_lens = (1,) * len(RAGGED) if phase == "decode" else (1, 1, 7, 16, 2, 130)
    check(backend, pool, q_lens)


@both
@pytest.mark.parametrize("ratio", [1, 3, 4, 5, 7, 8, 16])
def test_case_1_odd_gqa_ratios(backend: Any, paged: Callable[..., Any], ratio: int) -> None:
    pool = paged((33, 6, 140), 2 * ratio, 2, 32, 16)
    check(backend, pool, (1, 1, 1))
    check(backend, pool, (33, 2, 70))


@both
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 20])
def test_case_2_head_dims(backend: Any, paged: Callable[..., Any], head_dim: int) -> None:
    pool = paged((70, 3), 3, 1, head_dim, 16)
    check(backend, pool, (1, 1))
    check(backend, pool, (40, 3))


@both
@pytest.mark.parametrize("window", [1, 8, 100, 600])
def test_case_16_window_counts_the_query_itself(backend: Any, paged: Callable[..., Any], window: int) -> None:
    facts = LayerFacts(scale=0.2, window=window)
    pool = paged((40, 5, 700), 4, 2, 32, 16)
    check(backend, pool, (1, 1, 1), facts)
    check(backend, pool, (40, 3, 300), facts)


@both
def test_softcap(backend: Any, paged: Callable[..., Any]) -> None:
    facts = LayerFacts(scale=1.0, window=50, softcap=4.0)
    pool = paged((40, 5, 130), 4, 2, 32, 16)
    check(backend, pool, (1, 1, 1), facts)
    check(backend, pool, (40, 3, 99), facts)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_float32(backend: Any, paged: Callable[..., Any], dtype: torch.dtype) -> None:
    pool = paged((600, 31), 6, 2, 64, 16, dtype=dtype)
    check(backend, pool, (1, 1))
    check(backend, pool, (120, 30))


@both
def test_kv_dtype_may_differ(backend: Any, paged: Callable[..., Any]) -> None:
    check(backend, paged((50, 31), 6, 2, 64, 16, dtype=torch.float32, kv_dtype=torch.bfloat16), (1, 20))


@both
def test_captured_decode_follows_the_device_lengths(backend: Any, paged: Callable[..., Any]) -> None:
    pool = paged((37, 2, 64), 6, 2, 32, 16)
    batch = pool.batch((1, 1, 1), captured=True, max_kv=300)
    q = pool.randn(4, 6, 32)
    q[-1] = torch.nan  # what a padding row computes stays in its row
    out = pool.run(backend, q, batch, PLAIN)
    torch.testing.assert_close(out[:3].double(), pool.expected(q[:3], (1, 1, 1), PLAIN), atol=1e-5, rtol=1e-5)


@both
def test_huge_scores_do_not_overflow(backend: Any, paged: Callable[..., Any]) -> None:
    pool = paged((100, 30), 4, 2, 32, 16)
    check(backend, pool, (1, 30), LayerFacts(scale=100.0), tolerance=1e-3)  # float32 holds a score of 500 to 3e-5


@both
def test_nan_of_one_sequence_stays_there(backend: Any, paged: Callable[..., Any]) -> None:
    pool = paged((20, 20), 4, 2, 32, 4)
    pool.k_cache(0)[pool.pages[0]] = torch.nan
    q = pool.randn(2, 4, 32)
    out = pool.run(backend, q, pool.batch((1, 1)), PLAIN)
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1:].double(), pool.expected(q, (1, 1), PLAIN)[1:], atol=1e-5, rtol=1e-5)


@both
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_shape(backend: Any, paged: Callable[..., Any], data: st.DataObject) -> None:
    draw = data.draw
    lens = tuple(draw(st.lists(st.integers(1, 90), min_size=1, max_size=4)))
    q_lens = tuple(draw(st.integers(1, n)) for n in lens)
    kv_heads, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    head_dim, page_size = 4 * draw(st.integers(1, 24)), draw(st.sampled_from((1, 3, 16)))
    facts = LayerFacts(0.3, draw(st.none() | st.integers(1, 60)), draw(st.none() | st.just(3.0)))
    check(backend, paged(lens, ratio * kv_heads, kv_heads, head_dim, page_size), q_lens, facts)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_case_46_a_decode_row_does_not_depend_on_its_batch_or_the_threads(
    paged: Callable[..., Any], threads: int
) -> None:
    pool = paged((1700, 600, 3), 6, 2, 32, 16)
    q = pool.randn(3, 6, 32)
    alone = paged((1700,), 6, 2, 32, 16)
    alone.k_cache(0)[alone.pages[0]] = pool.k_cache(0)[pool.pages[0]]
    alone.v_cache(0)[alone.pages[0]] = pool.v_cache(0)[pool.pages[0]]
    expected = alone.run(NativeAttention, q[:1], alone.batch((1,)), PLAIN)
    torch.set_num_threads(threads)
    try:
        together = pool.run(NativeAttention, q, pool.batch((1, 1, 1)), PLAIN)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(together[:1], expected)
