"""Feed-forward blocks: dense, and a mixture of experts with an optional shared one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch

from minisgl_core.checkpoint import WeightTarget

from .base import Layer
from .linear import GatedLinear, ReplicatedLinear, RowLinear, split_evenly

if TYPE_CHECKING:
    from minisgl_core.core import Context

    from .norm import RMSNorm

__all__ = ["DenseMLP", "Experts", "SparseMLP"]

ALL = slice(None)


class DenseMLP(Layer):
    """silu(gate) * up, then down."""

    def __init__(self, ctx: Context, width: int, bias: bool = False) -> None:
        hidden = ctx.config.hidden_size
        self.gate_up_proj = GatedLinear(ctx, hidden, width, bias)
        self.down_proj = RowLinear(ctx, hidden, width, bias)

    def fuse_norm(self, norm: RMSNorm) -> None:
        """As :meth:`Linear.fuse_norm`."""
        self.gate_up_proj.fuse_norm(norm)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the norm returned, (T, hidden) each -> (new (T, hidden), still to be summed over ranks; residual)."""
        inner, residual = self.gate_up_proj.forward_normed(x, residual)
        return self.down_proj.partial(inner), residual


class Experts(Layer):
    """All experts of one layer, each cut by its inner width: w13 (E, 2I, hidden) gate rows first, w2 (E, hidden, I)."""

    def __init__(self, ctx: Context, layer_id: int) -> None:
        moe = ctx.config.moe
        assert moe is not None
        self._ctx, self._layer, self._moe = ctx, layer_id, moe
        self._inner = split_evenly("expert width", moe.intermediate_size, ctx.tp.size)
        hidden, kind = ctx.config.hidden_size, {"dtype": ctx.dtype, "device": ctx.device}
        self.w13: torch.Tensor | None = torch.empty(moe.num_experts, 2 * self._inner, hidden, **kind)  # type: ignore[call-overload]
        self.w2: torch.Tensor | None = torch.empty(moe.num_experts, hidden, self._inner, **kind)  # type: ignore[call-overload]
        self._prepared: Any = None

    def weight_targets(self, prefix: str, names: Collection[str]) -> Iterator[WeightTarget]:
        if f"{prefix}gate_up_proj" in names:
            yield from self._fused_targets(prefix)
        else:
            yield from self._expert_targets(prefix)

    def _fused_targets(self, prefix: str) -> Iterator[WeightTarget]:
        """transformers 5's own layout: gate_up_proj (E, 2I, hidden) and down_proj (E, hidden, I)."""
        assert self.w13 is not None and self.w2 is not None
        experts, _, hidden = self.w13.shape
        full, local = self._moe.intermediate_size, self._inner
        mine = self._ctx.tp.rank * local
        for part in (0, 1):
            rows = slice(part * full + mine, part * full + mine + local)
            target = self.w13[:, part * local : (part + 1) * local]
            yield WeightTarget(f"{prefix}gate_up_proj", (experts, 2 * full, hidden), (ALL, rows, ALL), target)
        columns = slice(mine, mine + local)
        yield WeightTarget(f"{prefix}down_proj", (experts, hidden, full), (ALL, ALL, columns), self.w2)

    def _expert_targets(self, prefix: str) -> Iterator[WeightTarget]:
        """One set of three matrices per expert."""
        assert self.w13 is not None and self.w2 is not None
        full, local, hidden = self._moe.intermediate_size, self._inner, self.w13.shape[2]
        mine = slice(self._ctx.tp.rank * local, (self._ctx.tp.rank + 1) * local)
        for e in range(self._moe.num_experts):
            for part, name in enumerate(("gate_proj", "up_proj")):
                target = self.w13[e, part * local : (part + 1) * local]
                yield WeightTarget(f"{prefix}{e}.{name}.weight", (full, hidden), (mine, ALL), target)
            yield WeightTarget(f"{prefix}{e}.down_proj.weight", (hidden, full), (ALL, mine), self.w2[e])

    def finish(self) -> None:
        assert self._ctx.moe is not None and self.w13 is not None and self.w2 is not None
        self._prepared = self._ctx.moe.prepare_weights(self._layer, self.w13, self.w2)
        self.w13 = self.w2 = None

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x (T, hidden), ids and weights (T, k) -> new (T, hidden), still to be summed over ranks."""
        assert self._ctx.moe is not None
        return self._ctx.moe.forward(x, ids, weights, self._prepared, self._layer)


class SparseMLP(Layer):
    """Router, routed experts, and the shared expert with its sigmoid gate where the model has one."""

    def __init__(self, ctx: Context, layer_id: int) -> None:
        moe = ctx.config.moe
        assert moe is not None
        self._ops, self._moe = ctx.ops, moe
        self.gate = ReplicatedLinear(ctx, moe.num_experts, ctx.config.hidden_size)
        self.experts = Experts(ctx, layer_id)
        self.shared_expert = DenseMLP(ctx, moe.shared_intermediate_size) if moe.shared_intermediate_size else None
        self.shared_expert_gate = (
            ReplicatedLinear(ctx, 1, ctx.config.hidden_size) if moe.shared_intermediate_size else None
        )

    def fuse_norm(self, norm: RMSNorm) -> None:
        """The router and the experts read the same norm, so it cannot be a prologue of one product."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (T, hidden), normalised -> (new (T, hidden), still to be summed over ranks; residual as it is)."""
        ids, weights = self._ops.route(self.gate.forward(x), self._moe.top_k, self._moe.norm_topk_prob)
        out = self.experts.forward(x, ids, weights)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            shared, _ = self.shared_expert.forward(x, residual)
            out = out + torch.sigmoid(self.shared_expert_gate.forward(x)) * shared
        return out, residual
