"""Experts for few tokens: matrix times vector per (token, expert) pair, without sorting and padding.

Few tokens rarely share an expert, so this reads hardly more than necessary, and it keeps the loads of several matrices
in flight. Shapes: T tokens, k experts per token, N = T * k pairs, E experts, I expert width, H hidden width.
Of a tensor (N.., ...) the first N rows count: one workspace serves calls of all sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..kernels import DEVICES, library
from ..launch import Form, Kernel, ceil_div
from ..tiles import Tile

__all__ = ["down_pairs", "up_pairs"]


@triton.jit(do_not_specialize=["num_experts", "top_k"])
def _up_kernel(
    out_ptr,
    x_ptr,
    w_ptr,
    ids_ptr,
    x_stride,
    num_experts,
    top_k,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[pair] = silu(gate) * up of ``BLOCK_N // 2`` interleaved pairs of weight rows."""
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids_ptr + pair)
    if (expert < 0) | (expert >= num_experts):
        return
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_at = w_ptr + (expert.to(tl.int64) * ROWS + rows)[:, None] * DEPTH
    depth = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in tl.static_range(0, DEPTH, BLOCK_K):
        at = k + depth
        inside = at < DEPTH
        x = tl.load(x_ptr + pair // top_k * x_stride + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(w_at + at[None, :], mask=(rows[:, None] < ROWS) & inside[None, :], other=0.0)
        total += weight.to(tl.float32) * x[None, :]
    gate, up = tl.split(tl.reshape(tl.sum(total, axis=1), (BLOCK_N // 2, 2)))
    columns = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + pair * (ROWS // 2) + columns, value.to(out_ptr.dtype.element_ty), mask=columns < ROWS // 2)


@triton.jit(do_not_specialize=["num_experts"])
def _down_kernel(
    out_ptr,
    inner_ptr,
    w_ptr,
    scale_ptr,
    ids_ptr,
    num_experts,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[token] = weighted sum over the token's experts, in their order."""
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(ids_ptr + pair)
        live = (expert >= 0) & (expert < num_experts)
        scale = tl.load(scale_ptr + pair, mask=live, other=0.0)
        end = tl.where(live, DEPTH, 0)  # nothing of a padding pair is read
        w_at = w_ptr + (expert.to(tl.int64) * ROWS + rows)[:, None] * DEPTH
        for k in tl.static_range(0, DEPTH, BLOCK_K):
            at = k + depth
            inside = at < end
            value = tl.load(inner_ptr + pair * DEPTH + at, mask=inside, other=0.0).to(tl.float32) * scale
            weight = tl.load(w_at + at[None, :], mask=(rows[:, None] < ROWS) & inside[None, :], other=0.0)
            total += weight.to(tl.float32) * value[None, :]
    tl.store(out_ptr + token * ROWS + rows, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=rows < ROWS)


_UP, _DOWN = Kernel(_up_kernel), Kernel(_down_kernel)


@lru_cache(maxsize=256)
def _up_form(rows: int, depth: int, tile: Tile) -> tuple[int, Form]:
    """The number of programs per pair, and the form."""
    form = _UP.form((rows, depth, tile.block_n, tile.block_k), warps=tile.warps)
    return ceil_div(rows, tile.block_n), form


@lru_cache(maxsize=256)
def _down_form(top_k: int, rows: int, depth: int, tile: Tile) -> tuple[int, Form]:
    """The number of programs per token, and the form."""
    form = _DOWN.form((top_k, rows, depth, tile.block_n, tile.block_k), warps=tile.warps)
    return ceil_div(rows, tile.block_n), form


def _up_pairs(out: torch.Tensor, x: torch.Tensor, w13: torch.Tensor, ids: torch.Tensor, tile: Sequence[int]) -> None:
    (experts, rows, depth), (tokens, top_k) = w13.shape, ids.shape
    programs, form = _up_form(rows, depth, Tile(*tile))
    form.launch((tokens * top_k, programs), (out, x, w13, ids), (experts, top_k), x.stride(0))


def _down_pairs(
    out: torch.Tensor,
    inner: torch.Tensor,
    w2: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor,
    tile: Sequence[int],
) -> None:
    (experts, rows, depth), (tokens, top_k) = w2.shape, ids.shape
    programs, form = _down_form(top_k, rows, depth, Tile(*tile))
    form.launch((tokens, programs), (out, inner, w2, scale, ids), (experts,))


up_pairs = library.register(
    "up_pairs(Tensor(a!) out, Tensor x, Tensor w13, Tensor ids, int[] tile) -> ()", _up_pairs, DEVICES
)
"""x (T, H), w13 (E, 2I, H) interleaved, ids (T, k) int32 -> out (N.., I) = silu(gate) * up; padding pairs stay"""
down_pairs = library.register(
    "down_pairs(Tensor(a!) out, Tensor inner, Tensor w2, Tensor scale, Tensor ids, int[] tile) -> ()",
    _down_pairs,
    DEVICES,
)
"""inner (N.., I), w2 (E, H, I), scale (T, k) float32, ids (T, k) int32 -> out (T, H)"""
