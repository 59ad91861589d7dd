"""Per-head q/k norm, rotary embedding and KV store in one pass over the projection's output."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kernels import DEVICES, library

__all__ = ["qk_norm_rope_store"]

HEADS_PER_PROGRAM = 4


@triton.jit
def _rope_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_loc_ptr,
    qkv_stride,
    cos_stride,
    slot_stride,
    head_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_DIM)
    live = (heads < Q_HEADS + 2 * KV_HEADS)[:, None] & (d < DIM)[None, :]
    at = qkv_ptr + token * qkv_stride + heads[:, None] * DIM + d[None, :]
    x = tl.load(at, mask=live, other=0.0).to(tl.float32)
    is_q, is_v = heads < Q_HEADS, heads >= Q_HEADS + KV_HEADS
    slot = tl.load(out_loc_ptr + token).to(tl.int64)

    # Each dimension turns with the one half a rotation away; dimensions past ROTARY stay.
    HALF: tl.constexpr = ROTARY // 2
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    turns = d < ROTARY
    other = tl.load(
        qkv_ptr + token * qkv_stride + heads[:, None] * DIM + partner[None, :],
        mask=live & turns[None, :],
        other=0.0,
    ).to(tl.float32)
    scaled, scaled_other = x, other
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        q_w = tl.load(q_weight_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
        k_w = tl.load(k_weight_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
        q_o = tl.load(q_weight_ptr + partner, mask=turns, other=0.0).to(tl.float32)
        k_o = tl.load(k_weight_ptr + partner, mask=turns, other=0.0).to(tl.float32)
        scaled = x * scale * tl.where(is_q[:, None], q_w[None, :], k_w[None, :])
        scaled_other = other * scale * tl.where(is_q[:, None], q_o[None, :], k_o[None, :])
    position = tl.load(positions_ptr + token).to(tl.int64)
    row = cos_sin_ptr + position * cos_stride
    cos = tl.load(row + d % HALF, mask=turns, other=1.0)
    sin = tl.load(row + HALF + d % HALF, mask=turns, other=0.0)
    sign = tl.where(d < HALF, -1.0, 1.0)
    rotated = scaled * cos[None, :] + scaled_other * (sign * sin)[None, :]
    out = tl.where(is_v[:, None], x, rotated).to(qkv_ptr.dtype.element_ty)

    # All reads of this tile are done before any thread overwrites a partner.
    tl.debug_barrier()
    tl.store(at, out, mask=live & (heads < Q_HEADS + KV_HEADS)[:, None])
    kv_head = tl.where(is_v, heads - Q_HEADS - KV_HEADS, heads - Q_HEADS)
    to = slot * slot_stride + kv_head[:, None] * head_stride + d[None, :]
    cached = out.to(k_cache_ptr.dtype.element_ty)
    tl.store(k_cache_ptr + to, cached, mask=live & ((heads >= Q_HEADS) & (heads < Q_HEADS + KV_HEADS))[:, None])
    tl.store(v_cache_ptr + to, cached, mask=live & is_v[:, None])


def _qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_loc: torch.Tensor,
) -> None:
    tokens, width = qkv.shape
    kv_heads, dim = k_cache.shape[2:]
    heads = width // dim
    if not tokens:
        return
    _rope_kernel[(tokens, triton.cdiv(heads, HEADS_PER_PROGRAM))](
        qkv,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        out_loc,
        qkv.stride(0),
        cos_sin.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        eps,
        Q_HEADS=heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        ROTARY=cos_sin.shape[1],
        NORM=q_weight is not None,
        BLOCK_HEADS=HEADS_PER_PROGRAM,
        BLOCK_DIM=triton.next_power_of_2(dim),
        num_warps=2,
    )


qk_norm_rope_store = library.register(
    "qk_norm_rope_store(Tensor(a!) qkv, Tensor? q_weight, Tensor? k_weight, float eps, Tensor positions, "
    "Tensor cos_sin, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor out_loc) -> ()",
    _qk_norm_rope_store,
    DEVICES,
)
"""qkv (T, (H+2K)*D) changed in place; k and v also stored to slots out_loc (T,) of the (P+1, S, K, D) caches"""
