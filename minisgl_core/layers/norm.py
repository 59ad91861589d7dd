"""Root-mean-square normalisation (Zhang and Sennrich 2019), alone and fused with the residual stream."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch

from minisgl_core.checkpoint import WeightTarget
from minisgl_core.plugin_api import AddNorm

from .base import Layer

if TYPE_CHECKING:
    from minisgl_core.core import Context

__all__ = ["RMSNorm"]


class RMSNorm(Layer):
    """A weight and an epsilon; the arithmetic is the chosen ops backend's."""

    def __init__(self, ctx: Context, size: int, eps: float) -> None:
        self._norm, self._add_norm = ctx.ops.rms_norm, ctx.ops.allreduce_add_rms_norm
        self.weight = torch.empty(size, dtype=ctx.dtype, device=ctx.device)
        self.eps = eps

    def weight_targets(self, prefix: str, names: Collection[str]) -> Iterator[WeightTarget]:
        yield WeightTarget(f"{prefix}weight", tuple(self.weight.shape), (slice(None),), self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, N) -> new (T, N)."""
        return self._norm(x, self.weight, self.eps)

    def beside(self, residual: torch.Tensor) -> AddNorm:
        """:meth:`forward_add` with this residual, for a product that takes it in."""
        return AddNorm(residual, self.weight, self.eps)

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (T, N), this rank's summand -> (norm of the sum of x over ranks plus residual, that sum)."""
        return self._add_norm(x, residual, self.weight, self.eps)
