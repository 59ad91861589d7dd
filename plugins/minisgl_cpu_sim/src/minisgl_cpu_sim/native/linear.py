"""``linear:cpu``: skinny products at memory speed, blocked ones above; weights are used unchanged."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from minisgl_core.plugin_api import LinearSetup

from .build import library
from .entry import DTYPE_CODES, kernel, threads

__all__ = ["NativeLinear"]

_SKINNY = 16
"""As in ``gemm.h``: up to this number of rows the kernel is bound by reading the weights."""


def _linear(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[float, ...]:
    rows, width = weight.shape
    return (
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        x.shape[0],
        rows,
        width,
        weight.stride(0),
        DTYPE_CODES[x.dtype],
        threads(),
    )


_OP = kernel("linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()", "minisgl_linear", "4P7q", _linear)


def _torch_multiplies_faster(dtype: torch.dtype) -> bool:
    """True if this CPU has instructions for large products that torch's libraries use and our 8-lane kernel does not.

    Without them torch's float32 product is 3 % slower than ours here (AVX2), its bfloat16 one five times slower.
    """
    if dtype == torch.float32:
        return torch.backends.cpu.get_cpu_capability() == "AVX512"
    try:
        features = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].split()
    except OSError:
        return False
    wanted = {"avx512_bf16", "amx_bf16", "bf16"} if dtype == torch.bfloat16 else {"avx512_fp16", "amx_fp16"}
    return not wanted.isdisjoint(features)


class NativeLinear:
    """float32, bfloat16 and float16 weights, float32 accumulation.

    Up to 16 rows of x each result is summed in one order: it does not depend on the batch.
    """

    def __init__(self, setup: LinearSetup, options: object = None) -> None:
        library()
        self._dtype = setup.dtype
        self._most_rows = _SKINNY if _torch_multiplies_faster(setup.dtype) else sys.maxsize

    def prepare_weights(self, weight: torch.Tensor) -> torch.Tensor:
        """weight (N, K); copied only if its rows are not contiguous."""
        if weight.dtype != self._dtype:
            raise TypeError(f"linear:cpu was set up for {self._dtype} weights, got {weight.dtype}")
        return weight if weight.stride(1) == 1 else weight.contiguous()

    def weight_of(self, weights: torch.Tensor) -> torch.Tensor:
        """The weight itself."""
        return weights

    def forward(self, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (M, K) -> new (M, N)."""
        if x.dtype is not weights.dtype:
            raise TypeError(f"linear:cpu got {x.dtype} activations for {weights.dtype} weights")
        rows = x.shape[0]
        if rows > self._most_rows:
            return F.linear(x, weights, bias)
        out = x.new_empty((rows, weights.shape[0]))
        _OP(out, x, weights, bias)
        return out

    def close(self) -> None:
        """Nothing to free."""
