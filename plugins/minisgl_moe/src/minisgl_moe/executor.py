"""Experts ``fused``: two products by expert, silu-and-mul inside the first, routing weights inside the second."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .tiles import SHIPPED, Geometry, Tiling, load_table, tiling_at
from .triton_ops.align import Alignment, align
from .triton_ops.grouped import down_grouped, sum_pairs, up_grouped
from .triton_ops.pairs import down_pairs, up_pairs

if TYPE_CHECKING:
    from minisgl_core.plugin_api import MoESetup

    from .options import FusedMoEOptions

__all__ = ["FusedMoE", "FusedWeights"]

MOST_TOKENS = 16384
"""More tokens are processed in chunks: by then the products are bound by arithmetic, and the workspace stays below a
gigabyte.
"""


class FusedWeights(NamedTuple):
    """The weights of one layer in the layout of the kernels."""

    w13: torch.Tensor
    """(E, 2I, H), rows gate 0, up 0, gate 1, up 1, ..."""
    w2: torch.Tensor
    """(E, H, I)"""


class FusedMoE:
    """Experts in Triton, with float32 accumulation and without atomics, so that equal input gives equal bits.

    One workspace serves all layers in turn.
    """

    def __init__(self, setup: MoESetup, options: FusedMoEOptions | None = None) -> None:
        self._dtype, self._experts, self._top_k = setup.dtype, setup.num_experts, setup.top_k
        self._shape13 = (setup.num_experts, 2 * setup.intermediate_size, setup.hidden_size)
        self._geometry = Geometry(
            0 if setup.platform is None else setup.platform.sm,
            str(setup.dtype).removeprefix("torch."),
            setup.num_experts,
            setup.top_k,
            setup.intermediate_size,
            setup.hidden_size,
        )
        folders = () if options is None else options.folders
        self._table = load_table(self._geometry, (*folders, SHIPPED))
        self._tilings: dict[int, Tiling] = {}
        self._most = max(1, min(setup.max_tokens, MOST_TOKENS))
        pairs = self._most * setup.top_k
        kind = {"dtype": setup.dtype, "device": setup.device}
        self._inner = torch.empty(pairs, setup.intermediate_size, **kind)  # type: ignore[call-overload]
        self._rows = torch.empty(pairs, setup.hidden_size, **kind)  # type: ignore[call-overload]
        self._aligned = Alignment.empty(pairs, setup.num_experts, setup.device)

    def prepare_weights(self, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> FusedWeights:
        """Copy w13 (E, 2I, H), gate rows first, with gate and up rows interleaved; w2 (E, H, I) is used unchanged.

        A block of interleaved rows has both halves of its output.
        """
        experts, double, hidden = self._shape13
        for name, weight, shape in (("w13", w13, self._shape13), ("w2", w2, (experts, hidden, double // 2))):
            if weight.dtype != self._dtype or tuple(weight.shape) != shape:
                raise ValueError(
                    f"moe:fused was set up for {name} {shape} of {self._dtype}, layer {layer_id} has "
                    f"{tuple(weight.shape)} of {weight.dtype}"
                )
        return FusedWeights(torch.stack(w13.chunk(2, dim=1), dim=2).view(self._shape13), w2.contiguous())

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        weights: FusedWeights,
        layer_id: int,
    ) -> torch.Tensor:
        """x (T, H) with any row stride, topk_ids and topk_weights (T, k) -> new (T, H); x is not changed."""
        if x.dtype != self._dtype:
            raise TypeError(f"moe:fused was set up for {self._dtype}, got {x.dtype} activations")
        x = x if x.stride(-1) == 1 else x.contiguous()
        ids, scale = topk_ids.contiguous(), topk_weights.contiguous()
        out, tokens = x.new_empty(x.shape), x.shape[0]
        if 0 < tokens <= self._most:
            self._run(out, x, ids, scale, weights)
            return out
        for first in range(0, tokens, self._most):
            part = slice(first, first + self._most)
            self._run(out[part], x[part], ids[part], scale[part], weights)
        return out

    def _run(
        self, out: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, scale: torch.Tensor, weights: FusedWeights
    ) -> None:
        tokens = x.shape[0]
        tiling = self._tilings.get(tokens)
        if tiling is None:
            tiling = self._tilings[tokens] = tiling_at(self._geometry, tokens, self._table)
        run = self._run_grouped if tiling.grouped else self._run_pairs
        run(out, x, ids, scale, weights, tiling)

    def _run_grouped(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        ids: torch.Tensor,
        scale: torch.Tensor,
        weights: FusedWeights,
        tiling: Tiling,
    ) -> None:
        inner, rows, (slots, experts, total, counts) = self._inner, self._rows, self._aligned
        align(slots, experts, total, counts, ids, self._experts, tiling.up.block_m)
        up_grouped(inner, x, weights.w13, slots, experts, total, self._top_k, tiling.up)
        down_grouped(rows, inner, weights.w2, scale, slots, experts, total, tiling.down)
        sum_pairs(out, rows, ids, self._experts)

    def _run_pairs(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        ids: torch.Tensor,
        scale: torch.Tensor,
        weights: FusedWeights,
        tiling: Tiling,
    ) -> None:
        up_pairs(self._inner, x, weights.w13, ids, tiling.up)
        down_pairs(out, self._inner, weights.w2, scale, ids, tiling.down)

    def close(self) -> None:
        """Free the workspace."""
        del self._inner, self._rows, self._aligned
