"""Role ``linear``, by the framework's own product: any device, dtype and shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

if TYPE_CHECKING:
    import torch

    from minisgl_core.plugin_api import LinearSetup

__all__ = ["PlainLinear"]


class PlainLinear:
    """``torch.nn.functional.linear`` on the weight as it is."""

    def __init__(self, setup: LinearSetup, options: Any = None) -> None:
        self._s = setup

    def prepare_weights(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def weight_of(self, weights: torch.Tensor) -> torch.Tensor:
        return weights

    def forward(self, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weights, bias)

    def close(self) -> None:
        """Nothing to free."""
