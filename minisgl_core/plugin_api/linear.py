"""Role ``linear``: matrix products with a model's weights, chosen per (N, K, M bucket)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from .platform import Platform

__all__ = ["LinearBackend", "LinearSetup"]


@dataclass(frozen=True, slots=True)
class LinearSetup:
    """All that a linear backend is told."""

    device: torch.device
    dtype: torch.dtype
    max_tokens: int
    platform: Platform | None = None
    """Since 1.1; the core always says it. None: whoever builds the backend has none at hand."""


class LinearBackend(Protocol):
    """y = x @ weight.T + bias. Built as ``Class(setup, options)``."""

    def prepare_weights(self, weight: torch.Tensor) -> Any:
        """Take this rank's weight (N, K), once; may repack it; the core then drops its own tensor.

        The tensor itself is never changed: where the plan gives large and small inputs to different backends, those
        that keep it as it is share it.
        """
        ...

    def weight_of(self, weights: Any) -> torch.Tensor:
        """The (N, K) tensor of prepared weights, as a view where the storage allows it."""
        ...

    def forward(self, x: torch.Tensor, weights: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (M, K), last dimension contiguous -> new (M, N) in x's dtype."""
        ...

    def close(self) -> None: ...
