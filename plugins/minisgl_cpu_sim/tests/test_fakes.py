"""The fakes: results worked out by hand, and the misuse that they refuse."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from minisgl_cpu_sim.fakes import FAKES, VendorMisuse, flash_attn, flash_attn_cute, flash_attn_interface, inject
from minisgl_cpu_sim.fakes import flashinfer as fake_flashinfer

INT = torch.int32


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=INT)


def _cache(page_size: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """One row's keys [1, 0], [0, 1], [1, 0] and values [4, 0], [0, 8], [0, 0] on pages 2 and 0; head_dim 8."""
    k, v = torch.full((3, page_size, 1, 8), torch.nan), torch.full((3, page_size, 1, 8), torch.nan)
    keys, values = torch.zeros(3, 8), torch.zeros(3, 8)
    keys[0, 0] = keys[1, 1] = keys[2, 0] = 1
    values[0, 0], values[1, 1] = 4, 8
    slots = [(2, 0), (2, 1), (0, 0)] if page_size == 2 else [(2, 0), (2, 1), (2, 2)]
    for slot, key, value in zip(slots, keys, values, strict=True):
        k[slot][0], v[slot][0] = key, value
    return k, v


SCALE = math.log(3.0)
QUERY = torch.tensor([[[1.0, 0, 0, 0, 0, 0, 0, 0]]])
# Scores ln 3, 0, ln 3 -> weights 3/7, 1/7, 3/7; over the first two keys 3/4, 1/4; over the last two 1/4, 3/4.
ALL, FIRST_TWO, LAST_TWO = [12 / 7, 8 / 7], [3.0, 2.0], [0.0, 2.0]


def _close(out: torch.Tensor, *rows: list[float]) -> None:
    want = torch.zeros(len(rows), 8)
    want[:, :2] = torch.tensor(rows)
    torch.testing.assert_close(out.reshape(-1, 8), want)


def test_flash_attention_3_by_hand() -> None:
    k, v = _cache()
    paged: dict[str, Any] = {"page_table": ints(2, 0)[None], "softmax_scale": SCALE}
    call = flash_attn_interface.flash_attn_with_kvcache
    out, lse = call(QUERY[None], k, v, cache_seqlens=ints(3), return_softmax_lse=True, **paged)
    _close(out, ALL)
    torch.testing.assert_close(lse, torch.tensor([[[math.log(7.0)]]]))
    _close(call(QUERY[None], k, v, cache_seqlens=ints(3), window_size=(1, 0), **paged), LAST_TWO)
    two = QUERY.expand(2, 1, 8)
    varlen = {"cu_seqlens_q": ints(0, 2), "max_seqlen_q": 2, "causal": True}
    _close(call(two, k, v, cache_seqlens=ints(3), **varlen, **paged), FIRST_TWO, ALL)


def test_flash_attention_3_unpaged_by_hand() -> None:
    k, v = (x.flatten(0, 1)[[4, 5, 0]] for x in _cache())
    cut = (ints(0, 1), ints(0, 3), 1, 3)
    _close(flash_attn_interface.flash_attn_varlen_func(QUERY, k, v, *cut, softmax_scale=SCALE, causal=True), ALL)


def test_the_operator_of_flash_attention_3_by_hand() -> None:
    k, v = _cache()
    fwd = flash_attn_interface.flash_attn_3_gpu.fwd.default
    out, lse, *partial = fwd(QUERY[None], k, v, seqused_k=ints(3), page_table=ints(2, 0)[None], softmax_scale=SCALE)
    _close(out, ALL)
    torch.testing.assert_close(lse, torch.tensor([[[math.log(7.0)]]]))
    assert [part.numel() for part in partial] == [0, 0]
    rows = {"cu_seqlens_q": ints(0, 1), "cu_seqlens_k": ints(0, 3), "max_seqlen_q": 1, "max_seqlen_k": 3}
    unpaged = [x.flatten(0, 1)[[4, 5, 0]] for x in (k, v)]
    out, lse, *_ = fwd(QUERY, *unpaged, **rows, softmax_scale=SCALE, is_causal=True, window_size_left=1)
    _close(out, LAST_TWO)
    torch.testing.assert_close(lse, torch.tensor([[math.log(4.0)]]))


def test_flash_attention_2_by_hand() -> None:
    k, v = _cache(256)
    table = {"block_table": ints(2)[None], "softmax_scale": SCALE, "causal": True}
    _close(flash_attn.flash_attn_with_kvcache(QUERY[None], k, v, cache_seqlens=ints(3), **table), ALL)
    two = QUERY.expand(2, 1, 8)
    _close(flash_attn.flash_attn_varlen_func(two, k, v, ints(0, 2), ints(0, 3), 2, 3, **table), FIRST_TWO, ALL)


def test_flash_attention_4_by_hand() -> None:
    k, v = _cache(128)
    rows: dict[str, Any] = {"cu_seqlens_q": ints(0, 2), "max_seqlen_q": 2, "seqused_k": ints(3)}
    out, lse = flash_attn_cute.flash_attn_varlen_func(
        QUERY.expand(2, 1, 8), k, v, page_table=ints(2)[None], softmax_scale=SCALE, causal=True, **rows
    )
    _close(out, FIRST_TWO, ALL)
    assert lse is None


def _decode(**more: Any) -> Any:
    return fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1024, dtype=torch.uint8), **more)


FACTS: dict[str, Any] = {"sm_scale": SCALE, "q_data_type": torch.float32}


def test_flashinfer_decode_by_hand() -> None:
    wrapper = _decode()
    wrapper.plan(ints(0, 2), ints(2, 0), ints(1), 1, 1, 8, 2, **FACTS)
    out, lse = wrapper.run(QUERY, _cache(), return_lse=True)
    _close(out, ALL)
    torch.testing.assert_close(lse, torch.tensor([[math.log2(7.0)]]))
    wrapper.plan(ints(0, 2), ints(2, 0), ints(1), 1, 1, 8, 2, window_left=1, **FACTS)
    _close(wrapper.run(QUERY, _cache()), LAST_TWO)


def test_flashinfer_prefill_by_hand() -> None:
    wrapper = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(1024, dtype=torch.uint8))
    wrapper.plan(ints(0, 2), ints(0, 2), ints(2, 0), ints(1), 1, 1, 8, 2, causal=True, **FACTS)
    _close(wrapper.run(QUERY.expand(2, 1, 8), _cache()), FIRST_TWO, ALL)


def test_flashinfer_sampling_by_hand() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.1, 0.1]])
    top_k, top_p = fake_flashinfer.top_k_renorm_probs, fake_flashinfer.top_p_renorm_probs
    torch.testing.assert_close(top_k(probs, ints(2)), torch.tensor([[0.625, 0.375, 0, 0]]))
    torch.testing.assert_close(top_k(probs, ints(3)), probs)
    torch.testing.assert_close(top_p(probs, torch.tensor([0.85])), probs)
    torch.testing.assert_close(top_p(probs, torch.tensor([0.4])), torch.tensor([[1.0, 0, 0, 0]]))
    seed = {"seed": torch.tensor([7]), "offset": torch.tensor([0])}
    drawn = fake_flashinfer.sampling_from_probs(probs.expand(4000, 4), **seed)
    counts = torch.bincount(drawn, minlength=4) / 4000
    torch.testing.assert_close(counts, probs[0], rtol=0, atol=0.03)
    assert torch.equal(drawn, fake_flashinfer.sampling_from_probs(probs.expand(4000, 4), **seed))
    only = torch.tensor([[0.0, 0.0, 0.4, 0.0]])  # a row whose sum lies below the number drawn
    assert set(fake_flashinfer.sampling_from_probs(only.expand(50, 4), **seed).tolist()) == {2}
    with pytest.raises(VendorMisuse, match="would freeze a number"):
        fake_flashinfer.sampling_from_probs(probs, seed=7, offset=0)


def _fixed(rows: int, pages: int) -> dict[str, Any]:
    return {
        "use_cuda_graph": True,
        "paged_kv_indptr_buffer": torch.zeros(rows + 1, dtype=INT),
        "paged_kv_indices_buffer": torch.zeros(pages, dtype=INT),
        "paged_kv_last_page_len_buffer": torch.zeros(rows, dtype=INT),
    }


def test_a_stale_plan_misses_the_newest_keys() -> None:
    buffers = _fixed(1, 4)
    wrapper = _decode(**buffers)
    wrapper.plan(ints(0, 1), ints(2), ints(2), 1, 1, 8, 2, **FACTS)
    _close(wrapper.run(QUERY, _cache()), FIRST_TWO)
    indptr, pages, last = [value for value in buffers.values() if isinstance(value, torch.Tensor)]
    for buffer, now in ((indptr, ints(0, 2)), (pages, ints(2, 0, 9, 9)), (last, ints(1))):
        buffer.copy_(now)
    _close(wrapper.run(QUERY, _cache()), FIRST_TWO)
    fake_flashinfer.fast_decode_plan(wrapper, ints(0, 2), pages, ints(1), 1, 1, 8, 2, **FACTS)
    _close(wrapper.run(QUERY, _cache()), ALL)


def test_wrappers_that_share_an_int_workspace_spoil_each_others_plans() -> None:
    shared = torch.zeros(4096, dtype=torch.uint8)
    first, second = _decode(), _decode()
    for wrapper, indptr in ((first, ints(0, 2)), (second, ints(0, 1))):
        wrapper.reset_workspace_buffer(torch.zeros(1024, dtype=torch.uint8), shared)
        wrapper.plan(indptr, ints(2, 0), ints(1), 1, 1, 8, 2, **FACTS)
    _close(first.run(QUERY, _cache()), FIRST_TWO)


K, V = _cache()
PAGED: dict[str, Any] = {"cache_seqlens": ints(3), "page_table": ints(2, 0)[None]}


def _fa3(q: torch.Tensor = QUERY[None], k: torch.Tensor = K, **changes: Any) -> Any:
    return flash_attn_interface.flash_attn_with_kvcache(q, k, V, **{**PAGED, **changes})


def _schedule(**changes: Any) -> torch.Tensor:
    facts = {"cache_seqlens": ints(3), "page_size": 2, "qkv_dtype": torch.float32, **changes}
    return flash_attn_interface.get_scheduler_metadata(1, 1, 4, 1, 1, 8, **facts)


def _plan(wrapper: Any, indptr: torch.Tensor, pages: torch.Tensor, last: torch.Tensor, *geometry: int) -> None:
    wrapper.plan(indptr, pages, last, *(geometry or (1, 1, 8, 2)), **FACTS)


MISUSE: dict[str, tuple[Callable[[], object], str]] = {
    "page table of int64": (lambda: _fa3(page_table=torch.tensor([[2, 0]])), "the page table must be int32"),
    "lengths of int64": (lambda: _fa3(cache_seqlens=torch.tensor([3])), "kv lengths must be int32"),
    "page table too narrow": (lambda: _fa3(page_table=ints(2)[None]), "room for 2"),
    "page outside the cache": (lambda: _fa3(page_table=ints(2, 3)[None]), r"pages \[3\] are outside"),
    "other dtype than the cache": (lambda: _fa3(QUERY[None].bfloat16()), "q is torch.bfloat16, the cache"),
    "query without rows": (lambda: _fa3(QUERY), "4"),
    "max_seqlen_q too small": (
        lambda: _fa3(QUERY.expand(2, 1, 8), cu_seqlens_q=ints(0, 2), max_seqlen_q=1),
        "max_seqlen_q is 1",
    ),
    "schedule of other splits": (lambda: _fa3(scheduler_metadata=_schedule(num_splits=3)), "num_splits"),
    "schedule of other lengths": (lambda: _fa3(scheduler_metadata=_schedule(cache_seqlens=ints(2))), r"lengths \[2\]"),
    "schedule of another page size": (lambda: _fa3(scheduler_metadata=_schedule(page_size=1)), "page_size"),
    "small pages": (
        lambda: flash_attn.flash_attn_with_kvcache(
            QUERY[None], K, V, cache_seqlens=ints(3), block_table=ints(2, 0)[None]
        ),
        "multiples of 256",
    ),
    "run before plan": (lambda: _decode().run(QUERY, (K, V)), "before plan"),
    "pages of int64": (lambda: _plan(_decode(), ints(0, 1), torch.tensor([2]), ints(1)), "indices must be int32"),
    "row without pages": (lambda: _plan(_decode(), ints(0, 0), ints(2), ints(1)), "every row needs a page"),
    "last page too long": (lambda: _plan(_decode(), ints(0, 1), ints(2), ints(3)), "within 1..2"),
    "fewer pages than named": (lambda: _plan(_decode(), ints(0, 2), ints(2), ints(1)), "there are 1 pages"),
    "group size 5": (lambda: _plan(_decode(), ints(0, 1), ints(2), ints(1), 5, 1, 8, 2), "no group size 5"),
    "fast plan first": (
        lambda: fake_flashinfer.fast_decode_plan(_decode(**_fixed(1, 2)), ints(0, 1), ints(2), ints(1), 1, 1, 8, 2),
        "before the first plan",
    ),
    "optional arguments by position": (
        lambda: _decode().plan(ints(0, 1), ints(2), ints(1), 1, 1, 8, 2, "NONE"),
        "by keyword",
    ),
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse_is_refused(what: str) -> None:
    call, complaint = MISUSE[what]
    with pytest.raises(VendorMisuse, match=complaint):
        call()


def test_fixed_buffers_must_fit() -> None:
    with pytest.raises(ValueError, match="indptr buffer of 3 for 1 rows"):
        _decode(**{**_fixed(1, 2), "paged_kv_indptr_buffer": torch.zeros(3, dtype=INT)})
    with pytest.raises(ValueError, match="2 rows for a wrapper with buffers of 1"):
        _plan(_decode(**_fixed(1, 2)), ints(0, 1, 2), ints(2, 0), ints(1, 1))
    with pytest.raises(ValueError, match="3 pages for a buffer of 2"):
        _plan(_decode(**_fixed(1, 2)), ints(0, 3), ints(2, 0, 1), ints(1))


def test_a_run_must_be_like_its_plan() -> None:
    wrapper = _decode()
    _plan(wrapper, ints(0, 2), ints(2, 0), ints(1))
    with pytest.raises(ValueError, match="planned"):
        wrapper.run(QUERY.bfloat16(), (K, V))
    with pytest.raises(VendorMisuse, match="window_left 1 was not planned"):
        wrapper.run(QUERY, (K, V), window_left=1)
    with pytest.raises(VendorMisuse, match="for 1 query tokens, q has 2"):
        wrapper.run(QUERY.expand(2, 1, 8), (K, V))


def test_what_a_fake_does_not_compute_it_says() -> None:
    with pytest.raises(NotImplementedError, match="softcap"):
        _fa3(softcap=1.0)
    with pytest.raises(NotImplementedError, match="out"):
        flash_attn_interface.flash_attn_3_gpu.fwd(QUERY, K, V, out=torch.zeros(1, 1, 8))
    with pytest.raises(NotImplementedError, match="sinks"):
        _decode().run(QUERY, (K, V), sinks=torch.zeros(1))


def test_injected_fakes_are_found_and_taken_away_again() -> None:
    before = {name: sys.modules.get(name) for name in FAKES}
    with pytest.MonkeyPatch.context() as patch:
        inject(patch)
        for name, fake in FAKES.items():
            assert import_module(name).__name__ == f"minisgl_cpu_sim.fakes.{fake}"
    assert {name: sys.modules.get(name) for name in FAKES} == before
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError, match="xformers"):
        inject(patch, "xformers")
