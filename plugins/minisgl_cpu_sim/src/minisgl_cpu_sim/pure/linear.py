"""``linear:fused``: torch's products fused with a norm before and an activation behind, step by step.

It is not faster. It exercises the core's code path for such products on a CPU, and shows what they must return.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl_core.plugin_api import AddNorm, LinearSetup

__all__ = ["FusedTorchLinear"]

MOST_ROWS = 16


class FusedTorchLinear:
    """Plain weights. Products of up to 16 rows are fused."""

    def __init__(self, setup: LinearSetup, options: object = None) -> None:
        pass

    def prepare_weights(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight (N, K), unchanged."""
        return weight

    def weight_of(self, weights: torch.Tensor) -> torch.Tensor:
        """The weight itself."""
        return weights

    def forward(self, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (M, K) -> new (M, N)."""
        return F.linear(x, weights, bias)

    def fused_rows(self, weights: torch.Tensor, norm: bool, act: bool) -> int:
        """The same for every weight."""
        return MOST_ROWS

    def forward_fused(
        self, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, norm: AddNorm | None, act: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (M, K) -> (y (M, N) or (M, N/2), total (M, K) or None)."""
        total = None
        if norm is not None:
            total = (x.float() + norm.residual.float()).to(x.dtype)
            wide = total.float()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
            x = (wide * scale * norm.weight.float()).to(total.dtype)
        out = self.forward(x, weights, bias)
        if act:
            gate, up = out.float().chunk(2, dim=-1)
            out = (F.silu(gate) * up).to(x.dtype)
        return out, total

    def close(self) -> None:
        """Nothing to free."""
