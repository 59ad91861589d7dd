"""Split-KV decode attention (Flash-Decoding, Dao et al. 2023) on paged caches, planned by nobody.

Slots are read from the engine's own page table, whatever the page size: four bytes beside a token's K and V.
Every row's keys are cut into SPLITS equal parts on the device, so one launch shape serves all lengths and a graph can
replay it while sequences grow. The query heads that share a kv head form one tile. B rows, K kv heads, G = H / K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kernels import DEVICES, library
from .skinny import INTERPRETED

__all__ = ["decode_attention"]


@triton.jit
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lines_ptr,
    kv_lens_ptr,
    acc_ptr,
    stat_ptr,
    scale_log2,
    softcap,
    q_row,
    q_head,
    slot_stride,
    head_stride,
    table_line,
    window,
    G: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Per (row, kv head, split): softmax statistics and the weighted values of one part of the keys."""
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    length = tl.load(kv_lens_ptr + row)
    slots_ptr = table_ptr + tl.load(lines_ptr + row).to(tl.int64) * table_line
    first = tl.maximum(length - window, 0)
    part = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK_T) * BLOCK_T
    start = first + split * part
    end = tl.minimum(start + part, length)
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    out = ((row * kv_heads + head) * SPLITS + split) * G + g
    if start >= end:
        tl.store(stat_ptr + out * 2, tl.full([BLOCK_G], float("-inf"), tl.float32), mask=g < G)
        return
    in_head = (g < G)[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + row * q_row + (head * G + g)[:, None] * q_head + d[None, :], mask=in_head, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for at in range(start, end, BLOCK_T):
        t = at + tl.arange(0, BLOCK_T)
        live = t < end
        offset = tl.load(slots_ptr + t, mask=live, other=0).to(tl.int64) * slot_stride + head * head_stride
        mask = live[:, None] & (d < DIM)[None, :]
        k = tl.load(k_ptr + offset[:, None] + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + offset[:, None] + d[None, :], mask=mask, other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if CAP:
            # tanh through exp2; the result is scaled so that everything after stays in base 2.
            turn = tl.exp2(scores * (2.0 * 1.4426950408889634 / softcap))
            scores = softcap * 1.4426950408889634 * (1.0 - 2.0 / (turn + 1.0))
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        mass = mass * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    tl.store(acc_ptr + out[:, None] * DIM + d[None, :], acc, mask=in_head)
    tl.store(stat_ptr + out * 2, top, mask=g < G)
    tl.store(stat_ptr + out * 2 + 1, mass, mask=g < G)


@triton.jit
def _combine_kernel(
    acc_ptr,
    stat_ptr,
    out_ptr,
    out_row,
    out_head,
    G: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Per (row, query head): the parts joined by their statistics."""
    row, q_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_heads = tl.num_programs(1) // G
    base = ((row * kv_heads + q_head // G) * SPLITS) * G + q_head % G
    s, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    at = base + s * G
    top = tl.load(stat_ptr + at * 2)
    present = top > float("-inf")
    mass = tl.load(stat_ptr + at * 2 + 1, mask=present, other=0.0)
    share = tl.exp2(top - tl.max(top, axis=0))
    acc = tl.load(acc_ptr + at[:, None] * DIM + d[None, :], mask=present[:, None] & (d < DIM)[None, :], other=0.0)
    joined = tl.sum(acc * share[:, None], axis=0) / tl.sum(mass * share, axis=0)
    tl.store(out_ptr + row * out_row + q_head * out_head + d, joined.to(out_ptr.dtype.element_ty), mask=d < DIM)


def _decode_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    lines: torch.Tensor,
    kv_lens: torch.Tensor,
    scratch: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    splits: int,
    block_t: int,
) -> None:
    rows, q_heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    group = q_heads // kv_heads
    size = rows * q_heads * splits
    acc, stat = scratch[: size * dim], scratch[size * dim : size * (dim + 2)]
    block_d = triton.next_power_of_2(dim)
    capped = softcap > 0
    _split_kernel[(rows, kv_heads, splits)](
        q, k_cache, v_cache, table, lines, kv_lens, acc, stat, scale if capped else scale * 1.4426950408889634,
        softcap, q.stride(0), q.stride(1), k_cache.stride(1), k_cache.stride(2), table.stride(0), window, G=group,
        DIM=dim, SPLITS=splits, CAP=capped, BLOCK_G=max(16, triton.next_power_of_2(group)), BLOCK_D=block_d,
        BLOCK_T=block_t, UPCAST=INTERPRETED, num_warps=4, num_stages=3,
    )  # fmt: skip
    _combine_kernel[(rows, q_heads)](
        acc, stat, out, out.stride(0), out.stride(1), G=group, DIM=dim, SPLITS=splits, BLOCK_D=block_d,
        num_warps=2 if splits * block_d < 8192 else 4,
    )  # fmt: skip


decode_attention = library.register(
    "decode_attention(Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor table, Tensor lines, "
    "Tensor kv_lens, Tensor(b!) scratch, float scale, int window, float softcap, int splits, int block_t) -> ()",
    _decode_attention,
    DEVICES,
)
"""q (B, H, D), caches (P+1, S, K, D), kv_lens (B,) -> out (B, H, D). Row b's token at position i is in slot
``table[lines[b], i]``: table (R, L), lines (B,). softcap 0 = none; scratch float32 of B * H * splits * (D + 2)"""
