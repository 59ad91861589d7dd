"""Linear backend ``skinny``: our own kernel where few rows meet a weight and it was measured faster, else cuBLAS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

from .tiles import TileTable
from .triton_ops.skinny import MAX_ROWS, default_tile, skinny_linear

if TYPE_CHECKING:
    import torch

    from minisgl_core.plugin_api import LinearSetup

__all__ = ["SkinnyLinear"]


class SkinnyLinear:
    """Chooses per (N, K, M): the tile table of this kind of device, measured by ``benchmarks/gpu_linear.py``."""

    def __init__(self, setup: LinearSetup, options: Any = None) -> None:
        self._tiles = TileTable.load("skinny")

    def prepare_weights(self, weight: torch.Tensor) -> torch.Tensor:
        """(N, K), used as it is."""
        return weight

    def weight_of(self, weights: torch.Tensor) -> torch.Tensor:
        """(N, K)"""
        return weights

    def forward(self, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (M, K) -> new (M, N)."""
        rows, (n, k) = x.shape[0], weights.shape
        if rows > MAX_ROWS:
            return F.linear(x, weights, bias)
        found = self._tiles.find(n, k, rows)
        if found is not None and not found:
            return F.linear(x, weights, bias)  # measured: cuBLAS is the faster one here
        out = x.new_empty((rows, n))
        skinny_linear(out, x, weights, bias, *(found or default_tile(rows, n, k)))
        return out

    def close(self) -> None:
        """Holds nothing."""
