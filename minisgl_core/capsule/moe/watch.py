"""Watching experts: the weights before they are prepared, and the executor's calls. Shapes as in :mod:`.capsule`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl_core.core import Batch

from ..watch import LayerCall, RoleWatch, WatchedStep, Watcher

if TYPE_CHECKING:
    from minisgl_core.plugin_api import MoEExecutor

__all__ = ["MoECall", "MoEWatch", "WatchedExperts"]

Weights = tuple[torch.Tensor, torch.Tensor]
"""w13 (E, 2I, N) and w2 (E, N, I)"""


@dataclass(frozen=True, slots=True)
class MoECall(LayerCall):
    """Copies of the inputs, and the layer's weights on the host."""

    tokens: torch.Tensor
    """(T,) which of the step's tokens these are"""
    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    weights: Weights


class MoEWatch(RoleWatch):
    """Wraps the engine's executor, and keeps every layer's weights on the host: an executor may repack them in place,
    and the core drops them. ``prepare`` is given each layer's weights on the device, as copies.
    """

    def __init__(
        self,
        watchers: Sequence[Watcher],
        label: str,
        prepare: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        super().__init__(watchers)
        self._label, self._prepare = label, prepare
        self._weights: dict[int, Weights] = {}

    def step_of(self, number: int, batch: Batch) -> WatchedStep:
        return WatchedStep(number, self._label, batch)

    def keep(self, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """A layer's weights, before the executor has them."""
        self._weights[layer_id] = w13.to("cpu", copy=True), w2.to("cpu", copy=True)
        if self._prepare is not None:
            self._prepare(layer_id, w13.clone(), w2.clone())

    def call_of(
        self, step: WatchedStep, layer_id: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> MoECall:
        """A layer's inputs, copied."""
        tokens, real = _tokens_of(step, len(x))
        inputs = x.clone(), topk_ids.clone(), topk_weights.clone()
        return MoECall(layer_id, real, tokens, *inputs, self._weights[layer_id])


def _tokens_of(step: WatchedStep, count: int) -> tuple[torch.Tensor, int]:
    """Which of the step's tokens a layer of ``count`` tokens has: all, or those that the last layer keeps; and how many
    are no padding.
    """
    batch = step.batch
    kept = batch.last_rows if batch.scored is None else batch.scored.kept
    if kept is not None and count != sum(step.q_lens):
        return kept.clone(), len(kept)
    return torch.arange(count), min(count, step.real_tokens)


class WatchedExperts:
    """A ``MoEExecutor`` that does what another one does, before witnesses."""

    def __init__(self, executor: MoEExecutor, watch: MoEWatch) -> None:
        self._executor, self._watch = executor, watch

    def prepare_weights(self, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> Any:
        self._watch.keep(layer_id, w13, w2)
        return self._executor.prepare_weights(layer_id, w13, w2)

    def forward(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, weights: Any, layer_id: int
    ) -> torch.Tensor:
        active = self._watch.active
        if active is None:
            return self._executor.forward(x, topk_ids, topk_weights, weights, layer_id)
        call = self._watch.call_of(active.step, layer_id, x, topk_ids, topk_weights)
        return active.run(call, lambda: self._executor.forward(x, topk_ids, topk_weights, weights, layer_id))

    def close(self) -> None:
        self._executor.close()
