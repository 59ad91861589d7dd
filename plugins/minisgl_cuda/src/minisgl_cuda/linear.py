"""Linear backend ``skinny``: our own kernel where few rows meet a weight and it was measured faster, else cuBLAS."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .options import SkinnyOptions
from .tiles import TileTable
from .triton_ops.dependent import dependent_launch
from .triton_ops.skinny import MAX_ROWS, default_tile, skinny_linear

if TYPE_CHECKING:
    from minisgl_core.plugin_api import LinearSetup

__all__ = ["SkinnyLinear"]


class Prepared(NamedTuple):
    """A weight, as our kernel and as the library's product want it: one storage."""

    weight: torch.Tensor
    """(N, K)"""
    transposed: torch.Tensor
    """(K, N)"""


class SkinnyLinear:
    """Chooses per (N, K, M): the tile table of this compute capability, measured by ``benchmarks/gpu_linear.py``.

    Tiles of one capability need not fit into another's shared memory (227 KiB on 9.0, 99 on 8.6, 8.9 and 12.0), so a
    device without a table of its own gets the default tiles, which fit everywhere.
    """

    def __init__(self, setup: LinearSetup, options: SkinnyOptions | None = None) -> None:
        self._platform = setup.platform
        sm = 0 if setup.platform is None else setup.platform.sm
        self._tiles = TileTable.load(f"skinny-sm{sm}")
        self._dependent = dependent_launch(sm, (options or SkinnyOptions()).dependent_launch)

    def prepare_weights(self, weight: torch.Tensor) -> Prepared:
        """(N, K), used as it is."""
        # A dependent launch reads it without waiting for the kernels before.
        if self._platform is not None:
            self._platform.synchronize()
        return Prepared(weight, weight.t())

    def weight_of(self, weights: Prepared) -> torch.Tensor:
        """(N, K)"""
        return weights.weight

    def forward(self, x: torch.Tensor, weights: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (M, K) -> new (M, N)."""
        rows = x.shape[0]
        if rows <= MAX_ROWS:
            n, k = weights.weight.shape
            found = self._tiles.find(n, k, rows)
            if found is None or found:  # else measured: cuBLAS is the faster one here
                out = x.new_empty((rows, n))
                skinny_linear(out, x, weights.weight, bias, *(found or default_tile(rows, n, k)), self._dependent)
                return out
        # What torch's ``linear`` comes down to; transposing in each call would cost the host more than all around it.
        return torch.mm(x, weights.transposed) if bias is None else torch.addmm(bias, x, weights.transposed)

    def close(self) -> None:
        """Holds nothing."""
