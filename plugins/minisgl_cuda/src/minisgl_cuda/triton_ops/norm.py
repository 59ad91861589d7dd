"""Root-mean-square norm with an optional residual, one program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..kernels import DEVICES, library

__all__ = ["add_rms_norm", "rms_norm"]


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    out_stride,
    width,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        at = residual_ptr + row * residual_stride + columns
        total = x + tl.load(at, mask=inside, other=0.0).to(tl.float32)
        # Rounded to the residual's dtype first: the norm must see what later layers will see.
        stored = total.to(residual_ptr.dtype.element_ty)
        tl.store(at, stored, mask=inside)
        x = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def _launch(
    out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> None:
    tokens, width = x.shape
    if not tokens:
        return
    block = triton.next_power_of_2(width)
    _norm_kernel[(tokens,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        width,
        eps,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )


def _rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    _launch(out, x, None, weight, eps)


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    _launch(x, x, residual, weight, eps)


rms_norm = library.register("rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()", _rms_norm, DEVICES)
"""x (T, N) -> out (T, N)"""
add_rms_norm = library.register(
    "add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()", _add_rms_norm, DEVICES
)
"""residual += x, then x = norm(residual), both in place; (T, N)"""
