"""Matrix products of few rows (M <= 16), where reading the weight is all the work: y (M, N) = x (M, K) @ w (N, K).T.

A program owns BLOCK_N rows of the weight and streams them once. M = 1 multiplies and adds on the vector units; more
rows go through the tensor cores, padded to 16. Under a dependent launch the weight is on its way before x is there:
reading it is what takes the time, and the kernels between two products leave the memory idle.

A product can be fused with silu(gate) * up behind it: a program then owns pairs of rows, a gate and its up. With a
single row of x it can also be fused with the norm before it: every program adds the residual and multiplies by the
norm's weights as it reads x, and divides by the root of the mean square at the end. With more rows each program would
repeat too much of this work: it was measured twice as slow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kernels import DEVICES, library
from .dependent import INTERPRETED, let_next_kernel_start, wait_for_previous_kernel

__all__ = ["MAX_ROWS", "Tile", "default_tile", "skinny_linear"]

MAX_ROWS = 16
AHEAD_BYTES = 128
"""Bytes of the weight that a thread holds in registers while it waits for x."""
MOST_CACHE_LINES = 64
"""Cache lines per weight row that are prefetched while the kernel waits for x, at most."""
Tile = tuple[int, int, int, int]
"""(BLOCK_N, BLOCK_K, num_warps, num_stages)"""


@triton.jit
def _fetch(w_ptr, rows, w_stride, N, BEGIN: tl.constexpr, K: tl.constexpr, CACHE_LINES: tl.constexpr):
    """Prefetch CACHE_LINES cache lines of 128 bytes per row into L2: 16-bit elements, from column BEGIN on."""
    k = tl.minimum(BEGIN + tl.arange(0, CACHE_LINES) * 64, K - 1)
    at = (w_ptr + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * w_stride + k[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _own_rows(N, BLOCK_N: tl.constexpr, PAIRS: tl.constexpr):
    """This program's rows of the weight, and a mask of those that exist. PAIRS: gate and up rows alternate."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < N
    if PAIRS:
        row = row // 2 + row % 2 * (N // 2)
    return row, inside


@triton.jit
def _input(x_at, residual_at, total_at, inside, kept, NORM: tl.constexpr):
    """Load x. With NORM: x + residual, rounded as later layers see it, and stored where ``kept``."""
    x = tl.load(x_at, mask=inside, other=0.0)
    if NORM:
        total = x.to(tl.float32) + tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
        x = total.to(x.dtype)
        tl.store(total_at, x, mask=kept)
    return x


@triton.jit
def _activated(out, DTYPE: tl.constexpr, M: tl.constexpr, PAIRS: tl.constexpr):
    """(M, 2 PAIRS) -> silu(gate) * up (M, PAIRS). Gate and up are rounded to DTYPE first, as in the unfused path."""
    gate, up = tl.split(tl.reshape(out.to(DTYPE).to(tl.float32), (M, PAIRS, 2)))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    residual_ptr,
    norm_weight_ptr,
    total_ptr,
    w_stride,
    N,
    eps,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    CACHE_LINES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    let_next_kernel_start(DEPENDENT)
    rows, inside = _own_rows(N, BLOCK_N, ACT)
    base = w_ptr + rows.to(tl.int64)[:, None] * w_stride
    k = tl.arange(0, AHEAD)
    w = tl.load(base + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
    # Weights are not the output of a kernel, so they may be loaded while the previous kernel still computes x.
    if DEPENDENT and K > AHEAD:
        _fetch(w_ptr, rows, w_stride, N, AHEAD, K, CACHE_LINES)
    wait_for_previous_kernel(DEPENDENT)
    kept = tl.where(tl.program_id(0) == 0, K, 0)  # one program stores the sum
    x = _input(x_ptr + k, residual_ptr + k, total_ptr + k, k < K, k < kept, NORM).to(tl.float32)
    if NORM:
        power = tl.sum(x * x, axis=0)
        x *= tl.load(norm_weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    out = tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    if K > AHEAD:
        sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        squares = tl.zeros([BLOCK_K], tl.float32)
        for start in range(AHEAD, K, BLOCK_K):
            at = start + tl.arange(0, BLOCK_K)
            x_rest = _input(x_ptr + at, residual_ptr + at, total_ptr + at, at < K, at < kept, NORM).to(tl.float32)
            if NORM:
                squares += x_rest * x_rest
                x_rest *= tl.load(norm_weight_ptr + at, mask=at < K, other=0.0).to(tl.float32)
            w_rest = tl.load(base + at[None, :], mask=inside[:, None] & (at < K)[None, :], other=0.0)
            sums += w_rest.to(tl.float32) * x_rest[None, :]
        out += tl.sum(sums, axis=1)
        if NORM:
            power += tl.sum(squares, axis=0)
    if NORM:
        out *= tl.rsqrt(power / K + eps)
    if BIAS:
        out += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    if ACT:
        rows = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        inside = rows < N // 2
        out = tl.reshape(_activated(out, out_ptr.dtype.element_ty, 1, BLOCK_N // 2), (BLOCK_N // 2,))
    tl.store(out_ptr + rows, out.to(out_ptr.dtype.element_ty), mask=inside)


# One variant serves every number of rows: Triton compiles a variant at first use, and no request may wait for that.
@triton.jit(do_not_specialize=["M"])
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
    ACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CACHE_LINES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    let_next_kernel_start(DEPENDENT)
    rows, inside = _own_rows(N, BLOCK_N, ACT)
    if DEPENDENT:
        _fetch(w_ptr, rows, w_stride, N, 0, K, CACHE_LINES)
    wait_for_previous_kernel(DEPENDENT)
    tokens = tl.arange(0, BLOCK_M)
    live = tokens < M
    w_base = w_ptr + rows.to(tl.int64)[None, :] * w_stride
    x_base = x_ptr + tokens.to(tl.int64)[:, None] * x_stride
    out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_base + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(w_base + k[:, None], mask=inside[None, :] & (k < K)[:, None], other=0.0)
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        out = tl.dot(x, w, out, input_precision="ieee")
    if BIAS:
        out += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ACT:
        rows = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        inside = rows < N // 2
        out = _activated(out, out_ptr.dtype.element_ty, BLOCK_M, BLOCK_N // 2)
    at = out_ptr + tokens.to(tl.int64)[:, None] * out_stride + rows[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


def default_tile(rows: int, n: int, k: int) -> Tile:
    """The tile without a measurement: enough programs to fill the chip, as wide as possible."""
    block_n = 32
    while block_n > (4 if rows == 1 else 16) and triton.cdiv(n, block_n) < 264:
        block_n //= 2
    if rows == 1:
        return block_n, min(triton.next_power_of_2(k), max(256, 8192 // block_n)), 4, 2
    return block_n, 256, 4, 4


def ahead(block_n: int, block_k: int, warps: int, k: int) -> int:
    """Elements of each row that the program of a single x loads at once: a power of two up to k, AHEAD_BYTES per
    thread.
    """
    most = AHEAD_BYTES * 32 * warps // (2 * block_n)
    return max(block_k, min(1 << (most.bit_length() - 1), 1 << (k.bit_length() - 1)))


def _skinny_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    block_n: int,
    block_k: int,
    warps: int,
    stages: int,
    dependent: bool,
    act: bool = False,
    total: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    dependent = dependent and not INTERPRETED
    rows, (n, k) = x.shape[0], weight.shape
    if residual is not None and rows != 1:
        raise ValueError(f"a product of {rows} rows cannot be fused with a norm, only one of a single row")
    grid = (triton.cdiv(n, block_n),)
    held = ahead(block_n, block_k, warps, k) if rows == 1 else 0
    cache_lines = min(MOST_CACHE_LINES, triton.next_power_of_2(max(1, -(-(k - held) // 64))))
    # Unused pointer arguments must still be pointers.
    tensors = (x, weight, weight if bias is None else bias, out)
    forms = {"BIAS": bias is not None, "ACT": act, "DEPENDENT": dependent}
    if rows == 1:
        before = (x, x, x) if residual is None else (residual, norm_weight, total)
        _gemv_kernel[grid](
            *tensors, *before, weight.stride(0), n, eps, K=k, **forms, NORM=residual is not None, BLOCK_N=block_n,
            BLOCK_K=block_k, AHEAD=held, CACHE_LINES=cache_lines, num_warps=warps, num_stages=stages,
            launch_pdl=dependent,
        )  # fmt: skip
    else:
        _skinny_kernel[grid](
            *tensors, x.stride(0), weight.stride(0), out.stride(0), rows, n, K=k, **forms, BLOCK_M=16,
            BLOCK_N=block_n, BLOCK_K=block_k, CACHE_LINES=cache_lines, UPCAST=INTERPRETED, num_warps=warps,
            num_stages=stages, launch_pdl=dependent,
        )  # fmt: skip


skinny_linear = library.register(
    "skinny_linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, int block_n, int block_k, int warps, "
    "int stages, bool dependent, bool act=False, Tensor(b!)? total=None, Tensor? residual=None, "
    "Tensor? norm_weight=None, float eps=0.0) -> ()",
    _skinny_linear,
    DEVICES,
)
"""x (M, K) with M <= MAX_ROWS, weight (N, K), bias (N,) -> out (M, N); the four numbers are a Tile; dependent: a
programmatic dependent launch (compute capability 9.0), which reads the weight before earlier kernels are done.

act: out (M, N/2) = silu(gate) * up of weight rows gate, then up. residual (1, K), norm_weight (K,), eps and total
(1, K) are given together, with M = 1: total = x + residual, and the product reads rms_norm(total) * norm_weight."""
