"""Products of pairs sorted by expert with that expert's weights, and the sum over each token's experts.

Shapes: T tokens, k experts per token, N = T * k pairs, E experts, I expert width, H hidden width. Row indices become
64-bit before they are multiplied by a stride. Padding rows are neither read nor written.
Of a tensor (N.., ...) the first N rows count: one workspace serves calls of all sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..kernels import DEVICES, library
from ..launch import Form, Kernel, ceil_div, power_of_two
from ..tiles import Tile
from .align import block_bound

__all__ = ["down_grouped", "sum_pairs", "up_grouped"]


@triton.jit
def _where_am_i(total_ptr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """(row block, column block, is there work): ``GROUP_M`` row blocks pass through the same columns together.

    The grid is an upper bound: the last group may have fewer row blocks, and then some programs are past its last
    column.
    """
    blocks = tl.load(total_ptr) // BLOCK_M
    group = tl.program_id(0) // (GROUP_M * COLUMNS)
    inside = tl.program_id(0) % (GROUP_M * COLUMNS)
    height = tl.maximum(tl.minimum(blocks - group * GROUP_M, GROUP_M), 1)
    block, column = group * GROUP_M + inside % height, inside // height
    return block, column, (block < blocks) & (column < COLUMNS)


@triton.jit
def _product(
    a_at,
    a_live,
    w,
    w_row,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    WIDEN: tl.constexpr,
    expert,
):
    """float32 (BLOCK_M, BLOCK_N): gathered rows ``a`` times weight rows from ``w_row`` on, of this expert."""
    EVEN: tl.constexpr = DEPTH % BLOCK_K == 0
    depth = tl.arange(0, BLOCK_K)
    rows = w_row + tl.arange(0, BLOCK_N)
    if not TMA:
        w_at = w + (expert.to(tl.int64) * ROWS + rows)[:, None] * DEPTH
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        at = k + depth[None, :]
        if EVEN:
            a = tl.load(a_at + at, mask=a_live[:, None], other=0.0)
        else:
            a = tl.load(a_at + at, mask=a_live[:, None] & (at < DEPTH), other=0.0)
        if TMA:
            # A block may overlap the next expert's rows; those columns are never stored.
            weight = w.load([expert * ROWS + w_row, k])
        elif EVEN and ROWS % BLOCK_N == 0:
            weight = tl.load(w_at + at)
        else:
            weight = tl.load(w_at + at, mask=(rows[:, None] < ROWS) & (at < DEPTH), other=0.0)
        if WIDEN:  # the interpreter cannot multiply half-precision matrices
            a, weight = a.to(tl.float32), weight.to(tl.float32)
        if SWAP:
            total = tl.dot(weight, tl.trans(a), total, input_precision="ieee")
        else:
            total = tl.dot(a, tl.trans(weight), total, input_precision="ieee")
    return tl.trans(total) if SWAP else total


@triton.jit(do_not_specialize=["pairs", "top_k"])
def _grouped_kernel(
    w,
    out_ptr,
    a_ptr,
    scale_ptr,
    slots_ptr,
    experts_ptr,
    total_ptr,
    a_stride,
    pairs,
    top_k,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out[pair] = product of row ``pair // top_k`` of a; gated in pairs of columns, or scaled by the pair's weight."""
    block, column, busy = _where_am_i(total_ptr, tl.cdiv(ROWS, BLOCK_N), BLOCK_M, GROUP_M)
    if not busy:
        return
    slots = tl.load(slots_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    live = slots < pairs
    expert = tl.load(experts_ptr + block)
    a_at = a_ptr + (slots // top_k).to(tl.int64)[:, None] * a_stride
    value = _product(a_at, live, w, column * BLOCK_N, ROWS, DEPTH, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, TMA, WIDEN, expert)
    WIDTH: tl.constexpr = ROWS // 2 if GATED else ROWS
    BLOCK_OUT: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if GATED:
        gate, up = tl.split(tl.reshape(value, (BLOCK_M, BLOCK_OUT, 2)))
        value = gate / (1.0 + tl.exp(-gate)) * up
    else:
        value *= tl.load(scale_ptr + slots, mask=live, other=0.0)[:, None]
    columns = column * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    at = out_ptr + slots.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(at, value.to(out_ptr.dtype.element_ty), mask=live[:, None] & (columns[None, :] < WIDTH))


_GROUPED = Kernel(_grouped_kernel)


@lru_cache(maxsize=1024)
def _product_form(
    pairs: int, num_experts: int, rows: int, depth: int, tile: Tile, gated: bool, widen: bool
) -> tuple[int, Form]:
    """The most programs of such a product, and its form."""
    m, n, k, group_m, warps, stages, swap, tma = tile
    constants = (int(gated), rows, depth, m, n, k, group_m, swap, tma, int(widen))
    form = _GROUPED.form(constants, warps=warps, stages=stages, block=(n, k) if tma else None)
    return block_bound(pairs, num_experts, m) * ceil_div(rows, n), form


def _up_grouped(
    out: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    slots: torch.Tensor,
    experts: torch.Tensor,
    total: torch.Tensor,
    top_k: int,
    tile: Sequence[int],
) -> None:
    pairs = x.shape[0] * top_k
    programs, form = _product_form(pairs, *w13.shape, Tile(*tile), True, not w13.is_cuda)
    form.launch((programs, 1), (w13, out, x, out, slots, experts, total), (pairs, top_k), x.stride(0))


def _down_grouped(
    out: torch.Tensor,
    inner: torch.Tensor,
    w2: torch.Tensor,
    scale: torch.Tensor,
    slots: torch.Tensor,
    experts: torch.Tensor,
    total: torch.Tensor,
    tile: Sequence[int],
) -> None:
    pairs = scale.numel()
    programs, form = _product_form(pairs, *w2.shape, Tile(*tile), False, not w2.is_cuda)
    form.launch((programs, 1), (w2, out, inner, scale, slots, experts, total), (pairs, 1), inner.stride(0))


@triton.jit(do_not_specialize=["num_experts"])
def _sum_kernel(
    out_ptr, pairs_ptr, ids_ptr, num_experts, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(ids_ptr + pair)
        end = tl.where((expert >= 0) & (expert < num_experts), WIDTH, 0)  # a padding pair's row was never written
        total += tl.load(pairs_ptr + pair * WIDTH + columns, mask=columns < end, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + columns, total.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)


_SUM = Kernel(_sum_kernel)


@lru_cache(maxsize=64)
def _sum_form(top_k: int, width: int) -> tuple[int, Form]:
    """The number of programs per token, and the form."""
    block = min(1024, power_of_two(width))
    return ceil_div(width, block), _SUM.form((top_k, width, block), warps=4)


def _sum_pairs(out: torch.Tensor, pairs: torch.Tensor, ids: torch.Tensor, num_experts: int) -> None:
    tokens, width = out.shape
    programs, form = _sum_form(ids.shape[1], width)
    form.launch((tokens, programs), (out, pairs, ids), (num_experts,))


_ALIGNED = "Tensor slots, Tensor experts, Tensor total"
up_grouped = library.register(
    f"up_grouped(Tensor(a!) out, Tensor x, Tensor w13, {_ALIGNED}, int top_k, int[] tile) -> ()", _up_grouped, DEVICES
)
"""x (T, H), w13 (E, 2I, H) interleaved -> out (N.., I) = silu(gate) * up"""
down_grouped = library.register(
    f"down_grouped(Tensor(a!) out, Tensor inner, Tensor w2, Tensor scale, {_ALIGNED}, int[] tile) -> ()",
    _down_grouped,
    DEVICES,
)
"""inner (N.., I), w2 (E, H, I), scale N float32 -> out (N.., H), each row times its scale"""
sum_pairs = library.register(
    "sum_pairs(Tensor(a!) out, Tensor pairs, Tensor ids, int num_experts) -> ()", _sum_pairs, DEVICES
)
"""pairs (N.., H) -> out (T, H): each token's k rows added in order, in float32, those of padding left out"""
