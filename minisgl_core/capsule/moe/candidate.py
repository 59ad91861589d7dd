"""A second expert executor beside the one that serves, with weights of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from minisgl_core.plugin_api import MoEExecutor

    from ..watch import WatchedStep
    from .watch import MoECall

__all__ = ["MoECandidate"]


class MoECandidate:
    """A :class:`~minisgl_core.capsule.shadow.Candidate`. All that it is given is a copy."""

    def __init__(self, executor: MoEExecutor, label: str) -> None:
        self._executor, self.label = executor, label
        self._prepared: dict[int, Any] = {}

    def prepare_weights(self, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """A layer's weights (E, 2I, N) and (E, N, I), to keep."""
        self._prepared[layer_id] = self._executor.prepare_weights(layer_id, w13, w2)

    def begin(self, step: WatchedStep) -> bool:
        return True

    def forward(self, step: WatchedStep, call: MoECall) -> Any:
        inputs = call.x.clone(), call.topk_ids.clone(), call.topk_weights.clone()
        return self._executor.forward(*inputs, self._prepared[call.layer_id], call.layer_id)

    def restore(self, step: WatchedStep, call: MoECall) -> str:
        """It can reach nothing that is not its own."""
        return ""

    def close(self) -> None:
        self._prepared.clear()
        self._executor.close()
