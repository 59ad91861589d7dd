"""``moe:torch``: routed experts in plain torch, on any device: tokens sorted by expert, one pair of products each.

The number of tokens of each expert is read on the host, so on a GPU it cannot be captured. On a CPU it is one
registered operation, whose body runs again in every replay. Shapes: T tokens, k experts per token, E experts, I expert
width, N hidden width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl_core.plugin_api import MoESetup

from ..library import register

__all__ = ["TorchMoE", "run_experts"]


class TorchMoE:
    """Experts in plain torch, on unchanged weights."""

    def __init__(self, setup: MoESetup, options: object = None) -> None:
        del setup, options

    def prepare_weights(self, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """w13 (E, 2I, N), gate rows first, and w2 (E, N, I)."""
        return w13, w2

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        layer_id: int,
    ) -> torch.Tensor:
        """x (T, N), topk_ids and topk_weights (T, k) -> new (T, N)."""
        out: torch.Tensor = _RUN_EXPERTS(x, topk_ids, topk_weights, *weights)
        return out

    def close(self) -> None:
        """Nothing to free."""


def run_experts(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Sum of the chosen experts' outputs, new (T, N); ids outside [0, E) are padding and contribute nothing.

    Each token's experts are added in the order of their ids, in float32, so that its result does not depend on the
    other tokens of the batch.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    experts = w13.shape[0]
    flat = topk_ids.flatten()
    order = torch.argsort(flat, stable=True)
    bounds = torch.searchsorted(flat[order], torch.arange(experts + 1, device=flat.device, dtype=flat.dtype))
    limits = bounds.tolist()
    for expert in range(experts):
        chosen = order[limits[expert] : limits[expert + 1]]
        if not len(chosen):
            continue
        rows = chosen // topk_ids.shape[1]
        gate, up = F.linear(x[rows], w13[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, w2[expert]).float()
        out.index_add_(0, rows, y * topk_weights.flatten()[chosen, None])
    return out.to(x.dtype)


_RUN_EXPERTS = register(
    "run_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w2) -> Tensor",
    run_experts,
    ("CPU", "CUDA"),
)
