"""Matrix products of few rows (M <= 16), where reading the weight is all the work: y (M, N) = x (M, K) @ w (N, K).T.

A program owns BLOCK_N rows of the weight and streams them once. M = 1 multiplies and adds on the vector units; more
rows go through the tensor cores, padded to 16. Under a dependent launch the weight is on its way before x is there:
reading it is what takes the time, and the kernels between two products leave the memory idle.
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
"""Of the weight that a thread holds in registers while it waits for x"""
MOST_LINES = 64
"""Of a row of the weight that are asked for while the kernel waits for several rows of x"""
Tile = tuple[int, int, int, int]
"""(BLOCK_N, BLOCK_K, num_warps, num_stages)"""


@triton.jit
def _fetch(w_ptr, rows, w_stride, N, BEGIN: tl.constexpr, K: tl.constexpr, LINES: tl.constexpr):
    """Ask the second-level cache for LINES lines of 128 bytes of these rows of 16-bit numbers, from column BEGIN on."""
    k = tl.minimum(BEGIN + tl.arange(0, LINES) * 64, K - 1)
    at = (w_ptr + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * w_stride + k[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


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
    AHEAD: tl.constexpr,
    LINES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    let_next_kernel_start(DEPENDENT)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    base = w_ptr + rows.to(tl.int64)[:, None] * w_stride
    k = tl.arange(0, AHEAD)
    w = tl.load(base + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
    # Weights are no kernel's output, so they come while the previous one still computes x.
    if DEPENDENT and K > AHEAD:
        _fetch(w_ptr, rows, w_stride, N, AHEAD, K, LINES)
    wait_for_previous_kernel(DEPENDENT)
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    out = tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    if K > AHEAD:
        total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in range(AHEAD, K, BLOCK_K):
            rest = start + tl.arange(0, BLOCK_K)
            x_rest = tl.load(x_ptr + rest, mask=rest < K, other=0.0).to(tl.float32)
            w_rest = tl.load(base + rest[None, :], mask=inside[:, None] & (rest < K)[None, :], other=0.0)
            total += w_rest.to(tl.float32) * x_rest[None, :]
        out += tl.sum(total, axis=1)
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
    LINES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    let_next_kernel_start(DEPENDENT)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if DEPENDENT:
        _fetch(w_ptr, rows, w_stride, N, 0, K, LINES)
    wait_for_previous_kernel(DEPENDENT)
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


def ahead(block_n: int, block_k: int, warps: int, k: int) -> int:
    """How much of each row the program of a single x loads at once: a power of two of up to k, AHEAD_BYTES a thread."""
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
) -> None:
    dependent = dependent and not INTERPRETED
    rows, (n, k) = x.shape[0], weight.shape
    grid = (triton.cdiv(n, block_n),)
    given = weight if bias is None else bias
    held = ahead(block_n, block_k, warps, k) if rows == 1 else 0
    lines = min(MOST_LINES, triton.next_power_of_2(max(1, -(-(k - held) // 64))))
    if rows == 1:
        _gemv_kernel[grid](
            x, weight, given, out, weight.stride(0), n, k, BIAS=bias is not None, BLOCK_N=block_n, BLOCK_K=block_k,
            AHEAD=held, LINES=lines, DEPENDENT=dependent, num_warps=warps, num_stages=stages,
            launch_pdl=dependent,
        )  # fmt: skip
    else:
        _skinny_kernel[grid](
            x, weight, given, out, x.stride(0), weight.stride(0), out.stride(0), rows, n, k, BIAS=bias is not None,
            BLOCK_M=16, BLOCK_N=block_n, BLOCK_K=block_k, LINES=lines,
            DEPENDENT=dependent, UPCAST=INTERPRETED, num_warps=warps, num_stages=stages, launch_pdl=dependent,
        )  # fmt: skip


skinny_linear = library.register(
    "skinny_linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, int block_n, int block_k, int warps, "
    "int stages, bool dependent) -> ()",
    _skinny_linear,
    DEVICES,
)
"""x (M, K) with M <= MAX_ROWS, weight (N, K), bias (N,) -> out (M, N); the four numbers are a Tile; dependent: a
programmatic dependent launch (compute capability 9.0), which reads the weight before earlier kernels are done"""
