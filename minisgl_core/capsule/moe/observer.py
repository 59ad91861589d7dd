"""Observes experts: the weights before they are prepared, and the executor's calls. Shapes as in :mod:`.capsule`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl_core.core import Batch

from ..role_observer import LayerCall, ObservedStep, RoleObserver, StepListener

if TYPE_CHECKING:
    from minisgl_core.plugin_api import MoEExecutor

    from ..shadow import Shadow

__all__ = ["MoECall", "MoEObserver", "ObservedExperts"]

Weights = tuple[torch.Tensor, torch.Tensor]
"""w13 (E, 2I, N) and w2 (E, N, I)"""


@dataclass(frozen=True, slots=True)
class MoECall(LayerCall):
    """One layer's call: copies of the inputs, and the layer's weights on the host."""

    tokens: torch.Tensor
    """(T,) which of the step's tokens these are"""
    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    weights: Weights


class MoEObserver(RoleObserver):
    """Wraps the engine's executor, and keeps every layer's weights on the host: an executor may repack them in place,
    and the core drops them. ``shadow`` gets copies of each layer's weights on the device.
    """

    def __init__(
        self,
        listeners: Sequence[StepListener],
        shadow: Shadow | None = None,
    ) -> None:
        super().__init__(listeners)
        self._shadow = shadow
        self._weights: dict[int, Weights] = {}

    def wrap(self, backend: MoEExecutor, label: str) -> ObservedExperts:
        return ObservedExperts(backend, label, self)

    def step_of(self, number: int, batch: Batch) -> ObservedStep:
        return ObservedStep(number, batch)

    def keep(self, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Copy a layer's weights, before the executor gets them."""
        self._weights[layer_id] = w13.to("cpu", copy=True), w2.to("cpu", copy=True)
        if self._shadow is not None:
            self._shadow.prepare_weights(layer_id, w13.clone(), w2.clone())

    def call_of(
        self, step: ObservedStep, label: str, layer_id: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> MoECall:
        """A layer's inputs, copied."""
        tokens, real = _tokens_of(step, len(x))
        inputs = x.clone(), ids.clone(), weights.clone()
        return MoECall(label, layer_id, real, tokens, *inputs, self._weights[layer_id])


def _tokens_of(step: ObservedStep, count: int) -> tuple[torch.Tensor, int]:
    """Which of the step's tokens a layer of ``count`` tokens has (all, or those that the last layer keeps), and how
    many are not padding.
    """
    batch = step.batch
    kept = batch.last_rows if batch.scored is None else batch.scored.kept
    if kept is not None and count != sum(step.q_lens):
        return kept.clone(), len(kept)
    return torch.arange(count), min(count, step.real_tokens)


class ObservedExperts:
    """A ``MoEExecutor`` that calls another one, and the observer in steps that a listener wants."""

    def __init__(self, executor: MoEExecutor, label: str, observer: MoEObserver) -> None:
        self._executor, self._label, self._observer = executor, label, observer

    def prepare_weights(self, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> Any:
        self._observer.keep(layer_id, w13, w2)
        return self._executor.prepare_weights(layer_id, w13, w2)

    def forward(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, weights: Any, layer_id: int
    ) -> torch.Tensor:
        active = self._observer.active
        if active is None:
            return self._executor.forward(x, topk_ids, topk_weights, weights, layer_id)
        call = self._observer.call_of(active.step, self._label, layer_id, x, topk_ids, topk_weights)
        return active.run(call, lambda: self._executor.forward(x, topk_ids, topk_weights, weights, layer_id))

    def close(self) -> None:
        self._executor.close()
