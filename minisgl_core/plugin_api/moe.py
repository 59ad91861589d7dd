"""Role ``moe``. Shapes: T tokens, E experts, I this rank's expert width, N hidden width, k experts per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from .platform import Platform

__all__ = ["MoEExecutor", "MoESetup"]


@dataclass(frozen=True, slots=True)
class MoESetup:
    """What an expert executor is constructed with. The activation is silu(gate) * up."""

    device: torch.device
    dtype: torch.dtype
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    """Rank-local expert width."""
    num_layers: int
    max_tokens: int
    platform: Platform | None = None
    """Since 1.1; the core always sets it. None: the caller that builds the backend has none."""


class MoEExecutor(Protocol):
    """Runs the routed experts; the rest of the block is the core's. Built as ``Class(setup, options)``."""

    def prepare_weights(self, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> Any:
        """Take w13 (E, 2I, N), gate rows first, and w2 (E, N, I), once; may repack; the core drops its tensors."""
        ...

    def forward(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, weights: Any, layer_id: int
    ) -> torch.Tensor:
        """x (T, N), topk_ids (T, k) int32, topk_weights (T, k) float32 -> new (T, N).

        An id of -1 is padding and contributes nothing. x is not changed.
        """
        ...

    def close(self) -> None: ...
