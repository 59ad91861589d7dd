"""Linear backend ``skinny``: our kernel where few rows of x were measured faster with it, else cuBLAS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from .options import SkinnyOptions
from .tiles import TileTable
from .triton_ops.act import act_and_mul
from .triton_ops.dependent import dependent_launch
from .triton_ops.norm import add_rms_norm
from .triton_ops.skinny import MAX_ROWS, default_tile, skinny_linear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl_core.plugin_api import AddNorm, LinearSetup

__all__ = ["FUSED_PARTS", "SkinnyLinear"]

FUSED_PARTS: Final = {(True, False): "norm", (False, True): "act", (True, True): "norm+act"}
"""Names of the parts of a tile file, by what is fused: a norm, an activation."""


class Prepared(NamedTuple):
    """A weight for our kernel and for the library's product, in one storage."""

    weight: torch.Tensor
    """(N, K)"""
    transposed: torch.Tensor
    """(K, N)"""
    tiles: tuple[list[int], ...]
    """Tiles by number of rows, up to ``MAX_ROWS``; [] = the library's product."""


class SkinnyLinear:
    """Chooses between kernel and library per (N, K, M), from the tile table of this compute capability.

    The table is measured by ``benchmarks/gpu_linear.py``. Weights that were not measured use cuBLAS, except for single
    rows where the table is uniform for weights of similar size (:meth:`TileTable.choose`). A device without a table
    uses cuBLAS only.
    """

    def __init__(self, setup: LinearSetup, options: SkinnyOptions | None = None) -> None:
        options = options or SkinnyOptions()
        self._platform = setup.platform
        sm = 0 if setup.platform is None else setup.platform.sm
        name = f"skinny-sm{sm}"
        self._tiles = TileTable.load(name)
        self._fused = {form: TileTable.load(name, part) for form, part in FUSED_PARTS.items()}
        self._dependent = dependent_launch(sm, options.dependent_launch)
        self._fuse = frozenset(options.fuse)

    def prepare_weights(self, weight: torch.Tensor) -> Prepared:
        """The weight (N, K), used unchanged."""
        # A dependent launch reads the weight without waiting for earlier kernels.
        if self._platform is not None:
            self._platform.synchronize()
        n, k = weight.shape
        return Prepared(weight, weight.t(), tuple(self._tiles.choose(n, k, rows) for rows in range(MAX_ROWS + 1)))

    def weight_of(self, weights: Prepared) -> torch.Tensor:
        """(N, K)"""
        return weights.weight

    def forward(self, x: torch.Tensor, weights: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (M, K) -> new (M, N)."""
        rows = x.shape[0]
        if rows <= MAX_ROWS and (tile := weights.tiles[rows]):
            out = x.new_empty((rows, weights.weight.shape[0]))
            skinny_linear(out, x, weights.weight, bias, *tile, self._dependent)
            return out
        # The core of torch's ``linear``: transposing in each call would dominate the host time.
        return torch.mm(x, weights.transposed) if bias is None else torch.addmm(bias, x, weights.transposed)

    def fused_rows(self, weights: Prepared, norm: bool, act: bool) -> int:
        """The largest number of rows for which fusing these operations was measured to be faster; other weights may be
        slower.
        """
        wanted = {op for op, asked in (("add_rms_norm", norm), ("act_and_mul", act)) if asked}
        if not wanted or not wanted <= self._fuse:
            return 0
        return min(self._fused[norm, act].most_rows(*weights.weight.shape), 1 if norm else MAX_ROWS)

    def forward_fused(
        self, x: torch.Tensor, weights: Prepared, bias: torch.Tensor | None, norm: AddNorm | None, act: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (M, K) -> (y (M, N) or (M, N/2), total (M, K) or None): one kernel for few rows, else several."""
        rows, (n, k) = x.shape[0], weights.weight.shape
        if rows > (MAX_ROWS if norm is None else 1):
            return self._unfused(x, weights, bias, norm, act)
        tile: Sequence[int] = self._fused[norm is not None, act].find(n, k, rows) or default_tile(rows, n, k)
        out, total = x.new_empty((rows, n // 2 if act else n)), None
        if norm is not None:
            total = x.new_empty((rows, k))
        before = (None, None, 0.0) if norm is None else norm
        skinny_linear(out, x, weights.weight, bias, *tile, self._dependent, act, total, *before)
        return out, total

    def _unfused(
        self, x: torch.Tensor, weights: Prepared, bias: torch.Tensor | None, norm: AddNorm | None, act: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        total = None
        if norm is not None:
            x, total = x.clone(), norm.residual.clone()
            add_rms_norm(x, total, norm.weight, norm.eps)
        out = self.forward(x, weights, bias)
        if not act:
            return out, total
        inner = x.new_empty((x.shape[0], out.shape[1] // 2))
        act_and_mul(inner, out)
        return inner, total

    def close(self) -> None:
        """Nothing to free."""
