"""A fake ``flash_attn_interface`` (FlashAttention 3): the paged part of ``flash_attn_with_kvcache`` and its schedule.

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

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_library = KernelLibrary("minisgl_fakes")


def _schedule(cache_seqlens: torch.Tensor, facts: list[int]) -> torch.Tensor:
    return torch.cat((torch.tensor(facts, dtype=torch.int32), cache_seqlens))


_make_schedule = _library.register("flash_attn_schedule(Tensor cache_seqlens, int[] facts) -> Tensor", _schedule)


def _check_schedule(schedule: torch.Tensor, cache_seqlens: torch.Tensor, facts: list[int]) -> torch.Tensor:
    require(
        schedule[: len(facts)].tolist() == facts,
        f"scheduler_metadata was made for {schedule[: len(facts)].tolist()}, the call is {facts} ({', '.join(_FACTS)})",
    )
    lens = schedule[len(facts) :].tolist()
    require(lens == cache_seqlens.tolist(), f"scheduler_metadata was made for lengths {lens}, not {cache_seqlens}")
    return schedule.clone()


_compare_schedule = _library.register(
    "flash_attn_check_schedule(Tensor schedule, Tensor cache_seqlens, int[] facts) -> Tensor", _check_schedule
)
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
    tensors = ("k", "v", "qv", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "cu_seqlens_k_new")
    unused = dict.fromkeys((*tensors, "rotary_seqlens", "q_descale", "k_descale", "v_descale", "sinks"))
    refuse_unless_default(
        "flash_attn_with_kvcache", {**unused, "attention_chunk": 0, "softcap": 0.0, "sm_margin": 0}, locals()
    )
    lens, table = check_paged(q, k_cache, v_cache, cache_seqlens, page_table, page_multiple=1)
    batch, varlen = lens.shape[0], cu_seqlens_q is not None
    require(q.dim() == (3 if varlen else 4), f"q has shape {tuple(q.shape)}; 3 dimensions with cu_seqlens_q, else 4")
    if cu_seqlens_q is not None:
        require(max_seqlen_q is not None, "cu_seqlens_q needs max_seqlen_q")
        flat, cu_q, most = q, cu_seqlens_q, int(max_seqlen_q or 0)
        int32("cu_seqlens_q", cu_q)
        require(cu_q.shape[0] == batch + 1, f"cu_seqlens_q has {cu_q.shape[0]} entries for {batch} rows")
    else:
        require(q.shape[0] == batch, f"q has {q.shape[0]} rows, cache_seqlens {batch}")
        flat, cu_q, most = q.flatten(0, 1), torch.arange(batch + 1, dtype=torch.int32) * q.shape[1], q.shape[1]
    if scheduler_metadata is not None:
        shape = [batch, most, table.shape[1] * k_cache.shape[1], *flat.shape[1:2], *k_cache.shape[2:4]]
        kernel = _kernel(causal, window_size, num_splits, pack_gqa)
        _compare_schedule(scheduler_metadata, lens, [*shape, k_cache.shape[1], int(varlen), *kernel])
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window_size[0], 0 if causal else window_size[1]
    out, lse = paged_attention(flat, k_cache, v_cache, cu_q, lens, table, most, scale, left, right, 0.0)
    out = out.view(q.shape)
    if not return_softmax_lse:
        return out
    return (out, lse if varlen else lse.view(q.shape[2], batch, -1).transpose(0, 1))


def check_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lens: int | torch.Tensor | None,
    table: torch.Tensor | None,
    *,
    page_multiple: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What all generations ask of a paged call; the lengths (B,) and the page table (B, P)."""
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
    unused = dict.fromkeys(("seqused_q", "seqused_k", "qv", "q_descale", "k_descale", "v_descale", "sinks"))
    others = {"attention_chunk": 0, "softcap": 0.0, "sm_margin": 0, "return_attn_probs": False}
    refuse_unless_default("flash_attn_varlen_func", {**unused, **others}, locals())
    for name, x, prefix, most in (("q", q, cu_seqlens_q, max_seqlen_q), ("k", k, cu_seqlens_k, max_seqlen_k)):
        int32(f"cu_seqlens_{name}", prefix)
        lens = prefix.diff().tolist()
        require(sum(lens) == x.shape[0], f"cu_seqlens_{name} ends at {sum(lens)}, {name} has {x.shape[0]} rows")
        require(max(lens) <= most, f"a row has {max(lens)} tokens, max_seqlen_{name} is {most}")
    require(q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES, f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}")
    require(k.shape == v.shape and k.shape[2] == q.shape[2], f"q {q.shape}, k {k.shape}, v {v.shape}")
    require(q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} query heads on {k.shape[1]} kv heads")
    require(all(x.stride(-1) == 1 for x in (q, k, v)), "heads must be contiguous")
    same_device(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window_size[0], 0 if causal else window_size[1]
    parts = zip(_cut(q, cu_seqlens_q), _cut(k, cu_seqlens_k), _cut(v, cu_seqlens_k), strict=True)
    return torch.cat([attend(*part, scale, left, right, 0.0)[0] for part in parts]).to(q.dtype)


def _cut(rows: torch.Tensor, prefix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts: tuple[torch.Tensor, ...] = rows.split(prefix.diff().tolist())
    return parts
