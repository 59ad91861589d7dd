"""``moe:cpu``: experts in one kernel call, tokens grouped by expert."""

from __future__ import annotations

import torch

from minisgl_core.plugin_api import MoESetup

from .build import library
from .entry import DTYPE_CODES, kernel, threads

__all__ = ["NativeMoE"]


def _moe(
    out: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> tuple[float, ...]:
    experts, width, inner = w2.shape
    return (
        x.data_ptr(),
        topk_ids.data_ptr(),
        topk_weights.data_ptr(),
        w13.data_ptr(),
        w2.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        x.shape[0],
        width,
        inner,
        experts,
        topk_ids.shape[1],
        DTYPE_CODES[x.dtype],
        threads(),
    )


_OP = kernel(
    "moe(Tensor(a!) out, Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w2) -> ()",
    "minisgl_moe",
    "6P8q",
    _moe,
)


class NativeMoE:
    """float32, bfloat16 and float16 weights, used unchanged, with float32 accumulation."""

    def __init__(self, setup: MoESetup, options: object = None) -> None:
        library()
        self._dtype = setup.dtype

    def prepare_weights(self, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """w13 (E, 2I, N), gate rows first, and w2 (E, N, I)."""
        for weight in (w13, w2):
            if weight.dtype != self._dtype:
                raise TypeError(f"moe:cpu was set up for {self._dtype} weights, got {weight.dtype}")
        return w13.contiguous(), w2.contiguous()

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        layer_id: int,
    ) -> torch.Tensor:
        """x (T, N), topk_ids (T, k) int32 and topk_weights (T, k) float32 -> new (T, N); x is not changed."""
        if x.dtype is not self._dtype:
            raise TypeError(f"moe:cpu got {x.dtype} activations for {self._dtype} weights")
        out = x.new_empty(x.shape)
        _OP(out, x, topk_ids.contiguous(), topk_weights.contiguous(), *weights)
        return out

    def close(self) -> None:
        """Nothing to free."""
