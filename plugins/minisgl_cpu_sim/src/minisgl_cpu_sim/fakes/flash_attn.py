"""A fake ``flash_attn.flash_attn_interface`` (FlashAttention 2), paged, pages that are multiples of 256."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from .attend import paged_attention
from .checks import int32, refuse_unless_default, require
from .flash_attn_interface import check_paged

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]

_PAGE_MULTIPLE = 256


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """q (T, H, D), k and v the (P, S, K, D) caches, lengths as a prefix sum -> new (T, H, D)."""
    others = {"dropout_p": 0.0, "alibi_slopes": None, "return_attn_probs": False}
    refuse_unless_default("flash_attn_varlen_func", others, locals())
    int32("cu_seqlens_q", cu_seqlens_q)
    int32("cu_seqlens_k", cu_seqlens_k)
    lens, table = check_paged(q, k, v, cu_seqlens_k.diff(), block_table, page_multiple=_PAGE_MULTIPLE)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window_size[0], 0 if causal else window_size[1]
    out, _ = paged_attention(q, k, v, cu_seqlens_q, lens, table, max_seqlen_q, scale, left, right, softcap)
    result: torch.Tensor = out
    return result


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """q (B, M, H, D) -> new tensor of its shape; with ``return_softmax_lse`` also the logsumexp (B, H, M)."""
    tensors = ("k", "v", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "alibi_slopes")
    refuse_unless_default("flash_attn_with_kvcache", dict.fromkeys(tensors), locals())
    lens, table = check_paged(q, k_cache, v_cache, cache_seqlens, block_table, page_multiple=_PAGE_MULTIPLE)
    require(q.dim() == 4 and q.shape[0] == lens.shape[0], f"q has shape {tuple(q.shape)} for {lens.shape[0]} rows")
    batch, new, heads, dim = q.shape
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    left, right = window_size[0], 0 if causal else window_size[1]
    cu_q = functional.pad(torch.full_like(lens, new).cumsum(0, dtype=torch.int32), (1, 0))
    out, lse = paged_attention(q.flatten(0, 1), k_cache, v_cache, cu_q, lens, table, new, scale, left, right, softcap)
    out = out.view(q.shape)
    return (out, lse.view(heads, batch, new).transpose(0, 1)) if return_softmax_lse else out
