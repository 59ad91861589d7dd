"""A second expert executor, with weights of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from minisgl_core.plugin_api import KVPool, MoEExecutor

    from ..role_observer import ObservedStep
    from .observer import MoECall

__all__ = ["MoECandidate"]


class MoECandidate:
    """A :class:`~minisgl_core.capsule.shadow.Candidate`. All its inputs are copies."""

    needs_finite_tail = False

    def __init__(self, executor: MoEExecutor, label: str, tolerance: float) -> None:
        self._executor, self.label, self.tolerance = executor, label, tolerance
        self._prepared: dict[int, Any] = {}

    def bind(self, pool: KVPool) -> None:
        """Experts use no KV."""

    def prepare_weights(self, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """A layer's weights (E, 2I, N) and (E, N, I), to keep."""
        self._prepared[layer_id] = self._executor.prepare_weights(layer_id, w13, w2)

    def begin(self, step: ObservedStep) -> bool:
        return True

    def forward(self, step: ObservedStep, call: MoECall) -> Any:
        inputs = call.x.clone(), call.topk_ids.clone(), call.topk_weights.clone()
        return self._executor.forward(*inputs, self._prepared[call.layer_id], call.layer_id)

    def restore(self, step: ObservedStep, call: MoECall) -> str:
        """It can change nothing but its own copies."""
        return ""

    def close(self) -> None:
        self._prepared.clear()
        self._executor.close()
