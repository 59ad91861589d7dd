"""silu(gate) * up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kernels import DEVICES, library

__all__ = ["act_and_mul"]

BLOCK = 1024


@triton.jit
def _act_kernel(x_ptr, out_ptr, x_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def _act_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    tokens, width = out.shape
    if tokens:
        _act_kernel[(tokens, triton.cdiv(width, BLOCK))](x, out, x.stride(0), width, BLOCK=BLOCK, num_warps=4)


act_and_mul = library.register("act_and_mul(Tensor(a!) out, Tensor x) -> ()", _act_and_mul, DEVICES)
"""x (T, 2I), gate first -> contiguous out (T, I)"""
