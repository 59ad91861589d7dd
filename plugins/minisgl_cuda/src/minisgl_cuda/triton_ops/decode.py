"""Split-KV decode attention (Flash-Decoding, Dao et al. 2023) on paged caches, without a host plan.

Slots are read from the engine's page table, whatever the page size: four bytes per token, little next to its K and V.
Every row's keys are cut into equal parts on the device, so one launch shape serves all lengths and a graph can
replay it while sequences grow. The query heads that share a kv head form one tile. B rows, K kv heads, G = H / K.

The parts of a row are joined in one of two ways. Two launches: a second kernel joins them when all are written. One
launch: each program increments a counter when its part is written, and the last one joins all parts. This saves a
launch and costs time where one program has many parts to join. No program waits for another, so it does not matter
which programs run at the same time. Parts are added in their order and not in order of arrival: results do not vary.

The counters are zero between launches: the program that joins resets its counter. This requires that launches which
share counters follow each other, as on one stream. A launch that fails half-way leaves counters above zero, but after
such a CUDA error the process cannot use its device memory any more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kernels import DEVICES, library
from .dependent import INTERPRETED, let_next_kernel_start, wait_for_previous_kernel

__all__ = ["decode_attention"]

JOINED_PER_WARP = 2048
"""Floats of partial results that a warp holds while it joins: 64 registers of each thread."""


@triton.jit
def _cut(length, window, SPLITS: tl.constexpr, block_t):
    """(visible keys, keys of a part): without a division, which would delay the loads of the keys."""
    visible = tl.minimum(length, window)
    return visible, (tl.cdiv(visible, SPLITS) + block_t - 1) & -block_t


@triton.jit
def _join_some(
    acc_ptr, log_ptr, at, step, begin, visible, part, DIM: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Join AT_ONCE parts from ``begin``, of which the first has keys: (largest logarithm, mass and sum
    relative to it).
    """
    s, d = begin + tl.arange(0, AT_ONCE), tl.arange(0, BLOCK_D)
    here = (s * part < visible)[:, None]
    rows = at[None, :] + s[:, None] * step
    # Bypass the L1 cache: another multiprocessor has just written them.
    logs = tl.load(log_ptr + rows, mask=here, other=float("-inf"), cache_modifier=".cg")
    accs = tl.load(
        acc_ptr + rows[:, :, None] * DIM + d[None, None, :], mask=here[:, :, None] & (d < DIM)[None, None, :],
        other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    top = tl.max(logs, axis=0)
    share = tl.exp2(logs - top[None, :])
    return top, tl.sum(share, axis=0), tl.sum(accs * share[:, :, None], axis=0)


@triton.jit
def _join(
    acc_ptr, log_ptr, at, step, visible, part, SPLITS: tl.constexpr, DIM: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Join the parts of some heads, weighted by their masses -> (heads, BLOCK_D). ``at`` (heads):
    position of part 0.
    """
    top, mass, total = _join_some(acc_ptr, log_ptr, at, step, 0, visible, part, DIM, AT_ONCE, BLOCK_D)
    if SPLITS > AT_ONCE:
        for begin in range(AT_ONCE, tl.cdiv(visible, part), AT_ONCE):
            more = _join_some(acc_ptr, log_ptr, at, step, begin, visible, part, DIM, AT_ONCE, BLOCK_D)
            new_top = tl.maximum(top, more[0])
            shrink, share = tl.exp2(top - new_top), tl.exp2(more[0] - new_top)
            mass = mass * shrink + more[1] * share
            total = total * shrink[:, None] + more[2] * share[:, None]
            top = new_top
    return total / mass[:, None]


@triton.jit
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    table_idx_ptr,
    kv_lens_ptr,
    acc_ptr,
    log_ptr,
    arrived_ptr,
    scale_log2,
    softcap,
    q_row,
    q_head,
    out_row,
    out_head,
    slot_stride,
    head_stride,
    table_stride,
    window,
    G: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    UPCAST: tl.constexpr,
    JOIN: tl.constexpr,
    JOIN_HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attention to one part of the keys, per (row, kv head, split). JOIN: the last program joins the parts."""
    let_next_kernel_start(DEPENDENT)
    wait_for_previous_kernel(DEPENDENT)
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    in_head = (g < G)[:, None] & (d < DIM)[None, :]
    # Issue the loads that do not depend on the length before the length is known.
    index = tl.load(table_idx_ptr + row)
    length = tl.load(kv_lens_ptr + row)
    q = tl.load(q_ptr + row * q_row + (head * G + g)[:, None] * q_head + d[None, :], mask=in_head, other=0.0)
    slots_ptr = table_ptr + index.to(tl.int64) * table_stride
    visible, part = _cut(length, window, SPLITS, BLOCK_T)
    # No index is negative. It is compared here because the compiler would otherwise move its load behind this branch,
    # and so behind the load of the length.
    if (split * part >= visible) | (index < 0):
        return
    start = length - visible + split * part
    end = tl.minimum(start + part, length)
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
    acc = acc / mass[:, None]
    to = out_ptr + row * out_row + (head * G + g)[:, None] * out_head + d[None, :]
    if JOIN and SPLITS == 1:  # known at compile time, so the rest is left out
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=in_head)
        return
    base = (row * kv_heads + head) * SPLITS * G
    mine = base + split * G + g
    if JOIN and part >= visible:
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=in_head)
        return
    tl.store(acc_ptr + mine[:, None] * DIM + d[None, :], acc, mask=in_head)
    tl.store(log_ptr + mine, top + tl.log2(mass), mask=g < G)
    if JOIN:
        # One thread counts for the block. The barrier orders the other threads' stores before it, the release makes
        # them visible to the program that acquires, and a second barrier passes the count to every thread.
        tl.debug_barrier()
        arrived_ptr += row * kv_heads + head
        arrived = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
        if (arrived + 1) * part >= visible:
            tl.store(arrived_ptr, 0)
            j = tl.arange(0, JOIN_HEADS)
            # Lanes past the last head repeat it.
            firsts = base + tl.minimum(j, G - 1)
            joined = _join(acc_ptr, log_ptr, firsts, G, visible, part, SPLITS, DIM, AT_ONCE, BLOCK_D)
            here = out_ptr + row * out_row + (head * G + j)[:, None] * out_head + d[None, :]
            tl.store(here, joined.to(out_ptr.dtype.element_ty), mask=(j < G)[:, None] & (d < DIM)[None, :])


@triton.jit
def _combine_kernel(
    acc_ptr,
    log_ptr,
    kv_lens_ptr,
    out_ptr,
    out_row,
    out_head,
    window,
    block_t,
    G: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Join the parts, per (row, query head)."""
    let_next_kernel_start(DEPENDENT)
    wait_for_previous_kernel(DEPENDENT)
    row, q_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_heads = tl.num_programs(1) // G
    visible, part = _cut(tl.load(kv_lens_ptr + row), window, SPLITS, block_t)
    at = (row * kv_heads + q_head // G) * SPLITS * G + q_head % G + tl.zeros([1], tl.int64)
    joined = _join(acc_ptr, log_ptr, at, G, visible, part, SPLITS, DIM, AT_ONCE, BLOCK_D)
    d = tl.arange(0, BLOCK_D)[None, :]
    tl.store(out_ptr + row * out_row + q_head * out_head + d, joined.to(out_ptr.dtype.element_ty), mask=d < DIM)


def _decode_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    table_idx: torch.Tensor,
    kv_lens: torch.Tensor,
    scratch: torch.Tensor,
    arrived: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    splits: int,
    block_t: int,
    warps: int,
    stages: int,
    dependent: bool,
) -> None:
    rows, q_heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    group = q_heads // kv_heads
    size = rows * q_heads * splits
    acc, log = scratch[: size * dim], scratch[size * dim : size * (dim + 1)]
    block_d, join_heads = triton.next_power_of_2(dim), triton.next_power_of_2(group)
    dependent = dependent and not INTERPRETED  # the interpreter runs one kernel after the other
    capped, inside = softcap > 0, arrived is not None
    held = JOINED_PER_WARP * warps // (block_d * join_heads) if inside else JOINED_PER_WARP * 4 // block_d
    at_once = max(1, min(splits, held))
    _split_kernel[(rows, kv_heads, splits)](
        q, k_cache, v_cache, out, table, table_idx, kv_lens, acc, log, arrived if inside else table_idx,
        scale if capped else scale * 1.4426950408889634, softcap, q.stride(0), q.stride(1), out.stride(0),
        out.stride(1), k_cache.stride(1), k_cache.stride(2), table.stride(0), window, G=group, DIM=dim, SPLITS=splits,
        CAP=capped, BLOCK_G=max(16, join_heads), BLOCK_D=block_d, BLOCK_T=block_t, UPCAST=INTERPRETED, JOIN=inside,
        JOIN_HEADS=join_heads, AT_ONCE=at_once, DEPENDENT=dependent, num_warps=warps, num_stages=stages,
        launch_pdl=dependent,
    )  # fmt: skip
    if inside:
        return
    _combine_kernel[(rows, q_heads)](
        acc, log, kv_lens, out, out.stride(0), out.stride(1), window, block_t, G=group, DIM=dim, SPLITS=splits,
        BLOCK_D=block_d, AT_ONCE=at_once, DEPENDENT=dependent,
        num_warps=2 if at_once * block_d <= JOINED_PER_WARP * 2 else 4, launch_pdl=dependent,
    )  # fmt: skip


decode_attention = library.register(
    "decode_attention(Tensor(a!) out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor table, Tensor table_idx, "
    "Tensor kv_lens, Tensor(b!) scratch, Tensor(c!)? arrived, float scale, int window, float softcap, int splits, "
    "int block_t, int warps, int stages, bool dependent) -> ()",
    _decode_attention,
    DEVICES,
)
"""q (B, H, D), caches (P+1, S, K, D), kv_lens (B,) -> out (B, H, D). Row b's token at position i is in slot
``table[table_idx[b], i]``: table (R, L), table_idx (B,). Each of kv_lens is at least 1. softcap 0 = none. scratch:
float32, B * H * splits * (D + 1). arrived: int32, B * K zeros, zero again afterwards, to join the parts within
one launch; None = two launches. dependent: programmatic dependent launch (compute capability 9.0)"""
