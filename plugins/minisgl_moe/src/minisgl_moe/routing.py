"""Ops backend ``fused_route``: one kernel from router logits to experts and weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .triton_ops.route import route

if TYPE_CHECKING:
    from minisgl_core.plugin_api import OpsSetup

__all__ = ["FusedRouting"]


class FusedRouting:
    """Offers the operation ``route``."""

    def __init__(self, setup: OpsSetup, options: Any = None) -> None:
        del setup, options

    def route(self, logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Router logits (T, E) -> ids (T, k) int32, weights (T, k) of the float32 softmax, largest first.

        Of equal logits the lower expert comes first. A row with a NaN gets NaN weights and valid ids.
        """
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        ids = logits.new_empty((logits.shape[0], top_k), dtype=torch.int32)
        weights = logits.new_empty((logits.shape[0], top_k), dtype=torch.float32)
        route(ids, weights, logits, renormalize)
        return ids, weights

    def close(self) -> None:
        """Nothing to free."""
