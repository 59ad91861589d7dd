"""A fake ``flash_attn_interface`` (FlashAttention 3): paged and unpaged rows, the schedule, and their operator.

A schedule holds the arguments and lengths that it was made for; a call with others is refused, where the real kernel
would run on another kernel's tiles. Softcap is refused, as builds usually leave it out. float32 is accepted on top of
what the real one takes, so that results can be compared exactly.
"""

from __future__ import annotations

from typing import Any

import torch

from minisgl_core.plugin_api import KernelLibrary

from .attend import attend, paged_attention
from .checks import int32, refuse_unless_default, require, same_device

__all__ = ["flash_attn_3_gpu", "flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_library = KernelLibrary("minisgl_fake_flash_attn_3")


def _schedule(cache_seqlens: torch.Tensor, facts: list[int]) -> torch.Tensor:
    return torch.cat((torch.tensor(facts, dtype=torch.int32), cache_seqlens))


_make_schedule = _library.register("make_schedule(Tensor cache_seqlens, int[] facts) -> Tensor", _schedule)


def _check_schedule(schedule: torch.Tensor, cache_seqlens: torch.Tensor, facts: list[int]) -> None:
    require(
        schedule[: len(facts)].tolist() == facts,
        f"scheduler_metadata was made for {schedule[: len(facts)].tolist()}, the call is {facts} ({', '.join(_FACTS)})",
    )
    lens = schedule[len(facts) :].tolist()
    require(lens == cache_seqlens.tolist(), f"scheduler_metadata was made for lengths {lens}, not {cache_seqlens}")


_FACTS = (
    *("batch", "max_seqlen_q", "max_seqlen_k", "q heads", "kv heads", "head_dim", "page_size"),
    *("varlen", "causal", "left", "right", "num_splits", "pack_gqa"),
)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """(13 + B,) int32: the arguments, then the lengths."""
    unused = {"cu_seqlens_k_new": None, "cache_leftpad": None, "max_seqlen_k_new": 0, "attention_chunk": 0}
    refuse_unless_default("get_scheduler_metadata", {**unused, "has_softcap": False, "sm_margin": 0}, locals())
    require(qkv_dtype in _DTYPES, f"qkv_dtype {qkv_dtype} is not supported")
    require(headdim_v in (None, headdim), "values must be as wide as keys")
    require(page_size is not None, "the fake computes paged attention only")
    int32("cache_seqlens", cache_seqlens)
    require(cache_seqlens.shape[0] == batch_size, f"batch_size is {batch_size}, cache_seqlens has another length")
    varlen = cu_seqlens_q is not None
    if cu_seqlens_q is not None:
        int32("cu_seqlens_q", cu_seqlens_q)
    shape = [batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, page_size or 0]
    schedule: torch.Tensor = _make_schedule(
        cache_seqlens, [*shape, int(varlen), *_kernel(causal, window_size, num_splits, pack_gqa)]
    )
    return schedule


def _kernel(causal: bool, window_size: tuple[int, int], num_splits: int, pack_gqa: bool | None) -> list[int]:
    return [int(causal), *window_size, num_splits, -1 if pack_gqa is None else int(pack_gqa)]


_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, "
    "int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, "
    "Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, "
    "int sm_margin = 0, Tensor? sinks = None) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    kv_batch_idx: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    seqlens_rotary: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    is_rotary_interleaved: bool = False,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (T, H, D) with ``cu_seqlens_q``, else (B, M, H, D); k and v the (P, S, K, D) caches with ``page_table``, else
    (N, K, D) with ``cu_seqlens_k`` -> new tensor of q's shape, logsumexp (H, T) or (B, H, M), and no partial results.
    """
    refuse_unless_default("flash_attn_3.fwd", dict.fromkeys(_UNUSED_TENSORS) | _UNUSED_NUMBERS, locals())
    varlen = cu_seqlens_q is not None
    require(q.dim() == (3 if varlen else 4), f"q has shape {tuple(q.shape)}; 3 dimensions with cu_seqlens_q, else 4")
    require(not varlen or max_seqlen_q is not None, "cu_seqlens_q needs max_seqlen_q")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window_size_left, 0 if is_causal else window_size_right
    if page_table is None:
        require(scheduler_metadata is None, "the fake computes schedules of paged attention only")
        result, lse = _unpaged(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, left, right)
        return result, lse, q.new_empty(0), q.new_empty(0)
    lens, table = check_paged(q, k, v, seqused_k, page_table, page_multiple=1)
    batch, flat, cu_q, most = lens.shape[0], q, cu_seqlens_q, int(max_seqlen_q or 0)
    if cu_q is None:
        require(q.shape[0] == batch, f"q has {q.shape[0]} rows, cache_seqlens {batch}")
        flat, cu_q, most = q.flatten(0, 1), torch.arange(batch + 1, dtype=torch.int32) * q.shape[1], q.shape[1]
    int32("cu_seqlens_q", cu_q)
    require(cu_q.shape[0] == batch + 1, f"cu_seqlens_q has {cu_q.shape[0]} entries for {batch} rows")
    if scheduler_metadata is not None:
        shape = [batch, most, table.shape[1] * k.shape[1], *flat.shape[1:2], *k.shape[2:4], k.shape[1], int(varlen)]
        kernel = _kernel(is_causal, (window_size_left, window_size_right), num_splits, pack_gqa)
        _check_schedule(scheduler_metadata, lens, [*shape, *kernel])
    result, lse = paged_attention(flat, k, v, cu_q, lens, table, most, scale, left, right, 0.0)
    if not varlen:
        result, lse = result.view(q.shape), lse.view(q.shape[2], batch, -1).transpose(0, 1)
    return result, lse, q.new_empty(0), q.new_empty(0)


_UNUSED_TENSORS = (
    *("k_new", "v_new", "q_v", "out", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k", "rotary_cos"),
    *("rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "sinks"),
)
_UNUSED_NUMBERS: dict[str, object] = {"attention_chunk": 0, "softcap": 0.0, "sm_margin": 0}


def _unpaged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    max_q: int | None,
    max_k: int | None,
    scale: float,
    left: int,
    right: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (T, H, D), k and v (N, K, D), cut by the two prefix sums -> new (T, H, D), logsumexp (H, T)."""
    require(cu_q is not None and cu_k is not None, "the fake computes rows of prefix sums, or pages")
    assert cu_q is not None and cu_k is not None
    for name, x, prefix, most in (("q", q, cu_q, max_q), ("k", k, cu_k, max_k)):
        int32(f"cu_seqlens_{name}", prefix)
        lens = prefix.diff().tolist()
        require(sum(lens) == x.shape[0], f"cu_seqlens_{name} ends at {sum(lens)}, {name} has {x.shape[0]} rows")
        require(most is not None and max(lens) <= most, f"a row has {max(lens)} tokens, max_seqlen_{name} is {most}")
    require(q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES, f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}")
    require(k.shape == v.shape and k.shape[2] == q.shape[2], f"q {q.shape}, k {k.shape}, v {v.shape}")
    require(q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} query heads on {k.shape[1]} kv heads")
    require(all(x.stride(-1) == 1 for x in (q, k, v)), "heads must be contiguous")
    same_device(q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    parts = zip(_cut(q, cu_q), _cut(k, cu_k), _cut(v, cu_k), strict=True)
    outs, sums = zip(*(attend(*part, scale, left, right, 0.0) for part in parts), strict=True)
    return torch.cat(outs).to(q.dtype), torch.cat(sums).T.float()


def _cut(rows: torch.Tensor, prefix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts: tuple[torch.Tensor, ...] = rows.split(prefix.diff().tolist())
    return parts


_run = _library.register(_FORWARD, _forward)
flash_attn_3_gpu = torch.ops.minisgl_fake_flash_attn_3
"""The real module's name of its operators; all of :func:`fwd` is one operation."""


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
) -> Any:
    """q (B, M, H, D), or (T, H, D) with ``cu_seqlens_q``; caches (P, S, K, D) -> new tensor of q's shape; with
    ``return_softmax_lse`` also the logsumexp, (B, H, M) or (H, T), and no partial results.
    """
    unused = {"k": None, "v": None, "cu_seqlens_k_new": None, "rotary_seqlens": None}
    refuse_unless_default("flash_attn_with_kvcache", unused, locals())
    require(page_table is not None, "the fake computes paged attention with lengths only")
    out, lse, *_ = _run(
        *(q, k_cache, v_cache, None, None, qv, None, cu_seqlens_q, None, None, None, cache_seqlens, max_seqlen_q, None),
        *(page_table, cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin, None, q_descale, k_descale, v_descale),
        *(softmax_scale, causal, *window_size, attention_chunk, softcap, rotary_interleaved, scheduler_metadata),
        *(num_splits, pack_gqa, sm_margin, sinks),
    )
    return (out, lse) if return_softmax_lse else out


def check_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lens: int | torch.Tensor | None,
    table: torch.Tensor | None,
    *,
    page_multiple: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Checks for paged calls of all generations; returns the lengths (B,) and the page table (B, P)."""
    require(isinstance(lens, torch.Tensor) and table is not None, "the fake computes paged attention with lengths only")
    assert isinstance(lens, torch.Tensor) and table is not None
    int32("the kv lengths", lens)
    int32("the page table", table, dims=2)
    require(table.shape[0] == lens.shape[0], f"{table.shape[0]} rows of pages for {lens.shape[0]} lengths")
    require(q.dtype in _DTYPES, f"q is {q.dtype}")
    require(q.dtype == k_cache.dtype == v_cache.dtype, f"q is {q.dtype}, the cache {k_cache.dtype}, {v_cache.dtype}")
    require(k_cache.dim() == 4 and k_cache.shape == v_cache.shape, f"caches {k_cache.shape}, {v_cache.shape}")
    require(all(x.stride(-1) == 1 for x in (q, k_cache, v_cache)), "heads must be contiguous")
    require(q.shape[-1] == k_cache.shape[-1], f"q has head_dim {q.shape[-1]}, the cache {k_cache.shape[-1]}")
    require(q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, f"head_dim {q.shape[-1]} is not a multiple of 8 up to 256")
    require(q.shape[-2] % k_cache.shape[-2] == 0, f"{q.shape[-2]} query heads on {k_cache.shape[-2]} kv heads")
    require(k_cache.shape[1] % page_multiple == 0, f"pages of {k_cache.shape[1]}, multiples of {page_multiple} work")
    same_device(q=q, k_cache=k_cache, v_cache=v_cache, lengths=lens, page_table=table)
    return lens, table


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Unpaged rows: q (T, H, D), k and v (N, K, D), cut by the two prefix sums -> new (T, H, D)."""
    unused = {"seqused_k": None, "return_attn_probs": False}
    refuse_unless_default("flash_attn_varlen_func", unused, locals())
    out: torch.Tensor = _run(
        *(q, k, v, None, None, qv, None, cu_seqlens_q, cu_seqlens_k, None, seqused_q, None, max_seqlen_q, max_seqlen_k),
        *(None, None, None, None, None, None, q_descale, k_descale, v_descale, softmax_scale, causal, *window_size),
        *(attention_chunk, softcap, True, None, num_splits, pack_gqa, sm_margin, sinks),
    )[0]
    return out
