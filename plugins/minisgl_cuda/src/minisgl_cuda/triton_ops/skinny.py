"""Matrix products of few rows (M <= 16), where reading the weight is all the work: y (M, N) = x (M, K) @ w (N, K).T.

A program owns BLOCK_N rows of the weight and streams them once. M = 1 multiplies and adds on the vector units; more
rows go through the tensor cores, padded to 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kernels import DEVICES, library

__all__ = ["MAX_ROWS", "Tile", "default_tile", "skinny_linear"]

MAX_ROWS = 16
INTERPRETED = triton.knobs.runtime.interpret
"""The interpreter's tl.dot is wrong on bfloat16 operands."""
Tile = tuple[int, int, int, int]
"""(BLOCK_N, BLOCK_K, num_warps, num_stages)"""


@triton.jit
def _gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    w_stride,
    N,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    base = w_ptr + rows.to(tl.int64)[:, None] * w_stride
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        w = tl.load(base + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
        total += w.to(tl.float32) * x[None, :]
    out = tl.sum(total, axis=1)
    if BIAS:
        out += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _skinny_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    w_stride,
    out_stride,
    M,
    N,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    inside, live = rows < N, tokens < M
    w_base = w_ptr + rows.to(tl.int64)[None, :] * w_stride
    x_base = x_ptr + tokens.to(tl.int64)[:, None] * x_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_base + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(w_base + k[:, None], mask=inside[None, :] & (k < K)[:, None], other=0.0)
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + tokens.to(tl.int64)[:, None] * out_stride + rows[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


def default_tile(rows: int, n: int, k: int) -> Tile:
    """A guess where nothing was measured: enough programs to fill the chip, as wide as that allows."""
    block_n = 32
    while block_n > (4 if rows == 1 else 16) and triton.cdiv(n, block_n) < 264:
        block_n //= 2
    if rows == 1:
        return block_n, min(triton.next_power_of_2(k), max(256, 8192 // block_n)), 4, 2
    return block_n, 256, 4, 4


def _skinny_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    block_n: int,
    block_k: int,
    warps: int,
    stages: int,
) -> None:
    rows, (n, k) = x.shape[0], weight.shape
    grid = (triton.cdiv(n, block_n),)
    given = weight if bias is None else bias
    if rows == 1:
        _gemv_kernel[grid](
            x, weight, given, out, weight.stride(0), n, k, BIAS=bias is not None, BLOCK_N=block_n, BLOCK_K=block_k,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    else:
        _skinny_kernel[grid](
            x, weight, given, out, x.stride(0), weight.stride(0), out.stride(0), rows, n, k, BIAS=bias is not None,
            BLOCK_M=16, BLOCK_N=block_n, BLOCK_K=block_k, UPCAST=INTERPRETED, num_warps=warps, num_stages=stages,
        )  # fmt: skip


skinny_linear = library.register(
    "skinny_linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, int block_n, int block_k, int warps, "
    "int stages) -> ()",
    _skinny_linear,
    DEVICES,
)
"""x (M, K) with M <= MAX_ROWS, weight (N, K), bias (N,) -> out (M, N); the last four numbers are a Tile"""
