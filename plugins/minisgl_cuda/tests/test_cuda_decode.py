"""attention:cuda_decode against float64: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="cuda_decode needs triton")

from minisgl_core.plugin_api import AttentionSetup, BatchView, LayerFacts
from minisgl_cuda.attention import CudaDecodeAttention
from minisgl_cuda.options import DecodeOptions

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
pytestmark = [pytest.mark.gpu] if ON_GPU else []


class Pool:
    """One layer of caches; every slot that no row owns is NaN."""

    layout = "NHD"

    def __init__(self, pages: int, size: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self.num_pages, self.page_size = pages, size
        self.caches = [torch.full((pages + 1, size, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)]

    def k_cache(self, layer: int) -> torch.Tensor:
        return self.caches[0]

    def v_cache(self, layer: int) -> torch.Tensor:
        return self.caches[1]


def make_case(
    lengths: list[int], size: int, q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Pool, torch.Tensor, BatchView]:
    """Rows of these lengths on shuffled pages."""
    torch.manual_seed(sum(lengths) + size + dim)
    counts = [-(-n // size) for n in lengths]
    pool = Pool(sum(counts) + 3, size, kv_heads, dim, dtype)
    order = torch.randperm(pool.num_pages).tolist()
    page_ids = torch.full((len(lengths), max(counts) + 2), pool.num_pages, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = [order.pop() for _ in range(count)]
        page_ids[row, :count] = torch.tensor(mine)
        slots = [mine[i // size] * size + i % size for i in range(length)]
        for cache in pool.caches:
            cache.view(-1, kv_heads, dim)[slots] = torch.randn(length, kv_heads, dim).to(dtype)
    pool.caches = [cache.to(DEVICE) for cache in pool.caches]
    q = torch.randn(len(lengths), q_heads + 2, dim).to(DEVICE, dtype)[:, :q_heads]  # a view with a wider token stride
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    cu_q = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE)
    view = BatchView(None, None, 1, max(lengths), cu_q, kv_lens, page_ids.to(DEVICE), size)
    return pool, q, view


def reference(pool: Pool, q: torch.Tensor, view: BatchView, facts: LayerFacts) -> torch.Tensor:
    """One row and head after the other, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    k_all, v_all = (cache.double().cpu().view(-1, *cache.shape[2:]) for cache in pool.caches)
    group, size = q.shape[1] // k_all.shape[1], view.page_size
    for row, length in enumerate(view.kv_lens_device.tolist()):
        first = max(0, length - facts.window) if facts.window else 0
        pages = view.page_ids_device[row].tolist()
        slots = [pages[i // size] * size + i % size for i in range(first, length)]
        for head in range(q.shape[1]):
            scores = k_all[slots, head // group] @ q[row, head].double().cpu() * facts.scale
            if facts.softcap:
                scores = facts.softcap * torch.tanh(scores / facts.softcap)
            out[row, head] = torch.softmax(scores, 0) @ v_all[slots, head // group]
    return out


def backend(pool: Pool, q: torch.Tensor, facts: LayerFacts, options: DecodeOptions | None = None) -> Any:
    kv_heads = pool.caches[0].shape[2]
    setup = AttentionSetup(
        DEVICE, q.dtype, q.dtype, "NHD", pool.page_size, q.shape[1], kv_heads, q.shape[2], (facts,), len(q), 64, 8192,
        2, SimpleNamespace(),  # type: ignore[arg-type]
    )  # fmt: skip
    # The interpreter runs one program after the other: few of them are enough there.
    found = CudaDecodeAttention(setup, options or (DecodeOptions() if ON_GPU else DecodeOptions(programs=8)))
    found.bind_kv(pool)
    return found


def check(lengths: list[int], size: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, **facts: Any) -> None:
    pool, q, view = make_case(lengths, size, *heads, dim, dtype)
    layer = LayerFacts(1 / math.sqrt(dim), **facts)
    out = backend(pool, q, layer).forward(q, q, q, 0, SimpleNamespace(view=view))
    assert out.shape == q.shape and out.dtype == dtype
    torch.testing.assert_close(
        out.double().cpu(), reference(pool, q, view, layer), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("size", [1, 16, 64, 256])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_case_68_short_and_split_sequences(size: int, dtype: torch.dtype) -> None:
    check([1, 2, 15, 16, 17, 4097 if ON_GPU else 300], size, (4, 2), 64, dtype)


@pytest.mark.parametrize(
    "heads", [(9, 3), (15, 5), (14, 2), (12, 2), (40, 8), (24, 4), (28, 4), (64, 4), (8, 1), (7, 7)]
)
@pytest.mark.parametrize("dim", [64, 128])
def test_case_1_odd_gqa_ratios(heads: tuple[int, int], dim: int) -> None:
    check([33] if not ON_GPU else [33, 7], 16, heads, dim, torch.float32)


@pytest.mark.parametrize("dim", [80, 96, 256])
def test_case_2_head_dims(dim: int) -> None:
    check([33, 1, 130], 16, (8, 1) if dim == 256 else (3, 3), dim, torch.float32)


def test_window_and_softcap() -> None:
    for window in (1, 8, 64, 500):
        check([1, 9, 100], 16, (2, 1), 64, torch.float32, window=window)
    check([1, 9, 100], 16, (2, 1), 64, torch.float32, softcap=2.0)


@pytest.mark.parametrize("splits", [1, 2, 64] if ON_GPU else [1, 16])
def test_any_number_of_splits_gives_the_same(splits: Any) -> None:
    pool, q, view = make_case([1, 63, 65, 200], 16, 2, 1, 64, torch.float32)
    facts = LayerFacts(0.125)
    ours = backend(pool, q, facts, DecodeOptions(splits=splits, block_tokens=16))
    out = ours.forward(q, q, q, 0, SimpleNamespace(view=view))
    torch.testing.assert_close(out.double().cpu(), reference(pool, q, view, facts), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("size", [1, 16])
def test_slots_come_from_the_engines_page_table(size: int) -> None:
    """Lines in another order than the rows, some nobody's; what stands past a row's length is not followed."""
    pool, q, view = make_case([33, 1, 70], size, 4, 2, 64, torch.float32)
    own, lines = view.slot_table()
    table = torch.full((6, own.shape[1] + 5), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    for row, (line, length) in enumerate(zip((4, 0, 2), view.kv_lens_device.tolist(), strict=True)):
        table[line, :length] = own[lines[row], :length]
    view.page_table_device, view.table_idx_device = table, torch.tensor([4, 0, 2], dtype=torch.int32, device=DEVICE)
    facts = LayerFacts(0.125)
    out = backend(pool, q, facts).forward(q, q, q, 0, SimpleNamespace(view=view))
    torch.testing.assert_close(out.double().cpu(), reference(pool, q, view, facts), atol=2e-6, rtol=2e-6)


def test_lengths_that_change_on_the_device_are_followed() -> None:
    pool, q, view = make_case([150, 100], 16, 2, 1, 64, torch.float32)
    facts = LayerFacts(0.125)
    ours = backend(pool, q, facts)
    for lengths in ([150, 100], [17, 99], [1, 1]):
        view.kv_lens_device.copy_(torch.tensor(lengths))
        out = ours.forward(q, q, q, 0, SimpleNamespace(view=view))
        torch.testing.assert_close(out.double().cpu(), reference(pool, q, view, facts), atol=2e-6, rtol=2e-6)
