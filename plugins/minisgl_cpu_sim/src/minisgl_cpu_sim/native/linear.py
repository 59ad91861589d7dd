"""``linear:cpu``: skinny products at memory speed, blocked ones above, weights kept as they come."""

from __future__ import annotations

import torch

from minisgl_core.plugin_api import LinearSetup

from ..library import register
from .build import library
from .entry import DTYPE_CODES, Entry, threads

__all__ = ["NativeLinear"]

_ENTRY = Entry("minisgl_linear", "4P7q")


def _linear(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    rows, width = weight.shape
    _ENTRY(
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


_OP = register("linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()", _linear)


class NativeLinear:
    """float32, bfloat16 and float16 weights, float32 accumulation.

    Up to 16 rows of x each result is summed in one order: it does not depend on the batch.
    """

    def __init__(self, setup: LinearSetup, options: object = None) -> None:
        library()
        self._dtype = setup.dtype

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
        out = x.new_empty((x.shape[0], weights.shape[0]))
        _OP(out, x, weights, bias)
        return out

    def close(self) -> None:
        """Holds nothing."""
