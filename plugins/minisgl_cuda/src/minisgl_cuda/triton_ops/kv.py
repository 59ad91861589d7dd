"""Row scatter into a paged pool, row gather from a vocabulary table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kernels import DEVICES, library

__all__ = ["index", "store"]

BLOCK = 1024
"""Elements that one program moves, of k and of v"""


@triton.jit
def _store_kernel(
    k_cache_ptr,
    v_cache_ptr,
    k_ptr,
    v_ptr,
    out_loc_ptr,
    k_slot_stride,
    v_slot_stride,
    k_stride,
    v_stride,
    width,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    slot = tl.load(out_loc_ptr + token).to(tl.int64)
    k = tl.load(k_ptr + token * k_stride + columns, mask=inside)
    v = tl.load(v_ptr + token * v_stride + columns, mask=inside)
    tl.store(k_cache_ptr + slot * k_slot_stride + columns, k, mask=inside)
    tl.store(v_cache_ptr + slot * v_slot_stride + columns, v, mask=inside)


@triton.jit
def _index_kernel(out_ptr, table_ptr, ids_ptr, start, rows, table_stride, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    row = tl.load(ids_ptr + token).to(tl.int64) - start
    readable = tl.where((row >= 0) & (row < rows), width, 0)
    found = tl.load(table_ptr + row * table_stride + columns, mask=columns < readable, other=0.0)
    tl.store(out_ptr + token * width + columns, found, mask=inside)


def _grid(tokens: int, width: int) -> tuple[int, int]:
    return tokens, triton.cdiv(width, BLOCK)


def _store(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor
) -> None:
    tokens, width = k.shape[0], k.shape[1] * k.shape[2]
    if tokens and width:
        _store_kernel[_grid(tokens, width)](
            k_cache,
            v_cache,
            k,
            v,
            out_loc,
            k_cache.stride(1),
            v_cache.stride(1),
            k.stride(0),
            v.stride(0),
            width,
            BLOCK=BLOCK,
        )


def _index(out: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, start: int, rows: int) -> None:
    tokens, width = out.shape
    if tokens and width:
        _index_kernel[_grid(tokens, width)](out, table, ids, start, rows, table.stride(0), width, BLOCK=BLOCK)


store = library.register(
    "kv_store_triton(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor out_loc) -> ()", _store, DEVICES
)
"""k, v (T, K, D), any token stride -> slots out_loc (T,) of (P + 1, S, K, D) caches"""
index = library.register(
    "kv_index_triton(Tensor(a!) out, Tensor table, Tensor ids, int start, int rows) -> ()", _index, DEVICES
)
"""table rows ids - start -> contiguous out (T, N); zeros for ids outside [start, start + rows)"""
