"""A fake ``flash_attn.cute`` (FlashAttention 4), paged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .attend import paged_attention
from .checks import int32, refuse_unless_default, require
from .flash_attn_interface import check_paged

__all__ = ["flash_attn_varlen_func"]

_PAGE_SIZE = 128


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    cu_total_m_blocks: torch.Tensor | None = None,
    cu_total_n_blocks: torch.Tensor | None = None,
    aux_tensors: list[torch.Tensor] | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q (T, H, D), k and v the (P, 128, K, D) caches -> new (T, H, D) and, if requested, logsumexp (H, T)."""
    mods = ("score_mod", "mask_mod", "block_sparse_tensors", "aux_tensors", "cu_total_m_blocks", "cu_total_n_blocks")
    unused = dict.fromkeys(("cu_seqlens_k", "seqused_q", "learnable_sink", *mods))
    refuse_unless_default("flash_attn_varlen_func", unused, locals())
    lens, table = check_paged(q, k, v, seqused_k, page_table, page_multiple=_PAGE_SIZE)
    require(k.shape[1] == _PAGE_SIZE, f"pages of {k.shape[1]}; its TMA loads take {_PAGE_SIZE}")
    require(cu_seqlens_q is not None and max_seqlen_q is not None, "the fake computes rows of cu_seqlens_q only")
    assert cu_seqlens_q is not None and max_seqlen_q is not None
    int32("cu_seqlens_q", cu_seqlens_q)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left = -1 if window_size[0] is None else window_size[0]
    right = 0 if causal else -1 if window_size[1] is None else window_size[1]
    out, lse = paged_attention(q, k, v, cu_seqlens_q, lens, table, max_seqlen_q, scale, left, right, softcap)
    return out, lse if return_lse else None
