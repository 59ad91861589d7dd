"""Root-mean-square normalisation (Zhang and Sennrich 2019), alone and fused with the residual stream."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch

from minisgl_core.checkpoint import WeightTarget

from .base import Layer

if TYPE_CHECKING:
    from minisgl_core.core import Context

__all__ = ["RMSNorm"]


class RMSNorm(Layer):
    """A weight and an epsilon; the chosen ops backend does the arithmetic."""

    def __init__(self, ctx: Context, size: int, eps: float) -> None:
        self._norm, self._add_norm = ctx.ops.rms_norm, ctx.ops.allreduce_add_rms_norm
        self.weight = torch.empty(size, dtype=ctx.dtype, device=ctx.device)
        self.eps = eps
        self._deferred_rows = 0

    def weight_targets(self, prefix: str, names: Collection[str]) -> Iterator[WeightTarget]:
        yield WeightTarget(f"{prefix}weight", tuple(self.weight.shape), (slice(None),), self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, N) -> new (T, N)."""
        return self._norm(x, self.weight, self.eps)

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x (T, N), this rank's summand -> (norm of the sum of x over ranks plus residual, that sum).

        ``residual`` None: the residual stream begins with x, which is then the same on every rank. Inputs that were
        deferred (see :meth:`defer`) are returned as they are.
        """
        if residual is None:
            assert not self._deferred_rows
            return self._norm(x, self.weight, self.eps), x
        if 0 < x.shape[0] <= self._deferred_rows:
            return x, residual
        return self._add_norm(x, residual, self.weight, self.eps)

    def defer(self, rows: int) -> None:
        """Leave inputs of 1 to ``rows`` rows to the product that reads them: its kernel adds and normalises."""
        self._deferred_rows = rows
