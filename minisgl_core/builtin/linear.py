"""Role ``linear``, by the framework's own product: any device, dtype and shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from minisgl_core.plugin_api import LinearSetup

__all__ = ["PlainLinear"]


class PlainLinear:
    """torch's product on the weight as it is, transposed once: that is what ``linear`` would do in every call."""

    def __init__(self, setup: LinearSetup, options: Any = None) -> None:
        self._s = setup

    def prepare_weights(self, weight: torch.Tensor) -> torch.Tensor:
        """(N, K) -> a view (K, N) of it."""
        return weight.t()

    def weight_of(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.t()

    def forward(self, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.mm(x, weights) if bias is None else torch.addmm(bias, x, weights)

    def close(self) -> None:
        """Nothing to free."""
