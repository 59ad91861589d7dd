"""Makes capsules of experts from observed steps. Shapes as in :mod:`.capsule`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .capsule import MoECapsule, MoEGeometry, MoELayer

if TYPE_CHECKING:
    from minisgl_core.plugin_api import MoESetup

    from ..role_observer import ObservedStep
    from .observer import MoECall

__all__ = ["MoEMaker"]


class MoEMaker:
    """A :class:`~minisgl_core.capsule.record.CapsuleMaker`; ``num_layers`` counts the layers with experts."""

    def __init__(self, setup: MoESetup, num_layers: int) -> None:
        self._num_layers, self._itemsize = num_layers, setup.dtype.itemsize
        self._geometry = MoEGeometry(
            dtype=str(setup.dtype).removeprefix("torch."),
            num_experts=setup.num_experts,
            top_k=setup.top_k,
            hidden_size=setup.hidden_size,
            intermediate_size=setup.intermediate_size,
            max_tokens=setup.max_tokens,
        )

    def least_bytes(self, step: ObservedStep) -> int:
        """The size if all tokens used the same experts, and the last layer had one token of each row."""
        g, layers = self._geometry, self._num_layers
        tokens = (layers - 1) * sum(step.q_lens) + len(step.q_lens)
        rows = tokens * (2 * g.hidden_size * self._itemsize + 8 * g.top_k + 8)
        return rows + layers * 3 * g.top_k * g.intermediate_size * g.hidden_size * self._itemsize

    def layer(self, call: MoECall, out: torch.Tensor | None) -> MoELayer:
        result = torch.full_like(call.x, torch.nan) if out is None else out
        tokens, x, ids, weights, result = (
            tensor.to("cpu", copy=True) for tensor in (call.tokens, call.x, call.topk_ids, call.topk_weights, result)
        )
        count = self._geometry.num_experts
        ids = torch.where((ids >= 0) & (ids < count), ids.long(), count)
        used = ids[ids < count].unique()
        numbers = torch.full((count + 1,), -1, dtype=torch.int32)
        numbers[used] = torch.arange(len(used), dtype=torch.int32)
        w13, w2 = (tensor[used] for tensor in call.weights)
        experts, inputs = tuple(used.tolist()), (tokens.to(torch.int32), x, numbers[ids], weights, torch.zeros(len(x)))
        return MoELayer(call.layer_id, result, experts, *inputs, w13, w2)

    def capsule(self, step: ObservedStep, layers: Sequence[MoELayer], origin: Mapping[str, Any]) -> MoECapsule:
        return MoECapsule(
            step=step.number,
            phase=step.phase,
            geometry=self._geometry,
            q_lens=step.q_lens,
            uids=step.uids,
            layers=tuple(layers),
            origin=dict(origin),
        )
