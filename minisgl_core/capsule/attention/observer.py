"""Observes attention: the pages of a step, and each backend's calls. Shapes as in :mod:`.capsule`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl_core.core import Batch
from minisgl_core.plugin_api import BatchView, KVPool

from ..role_observer import LayerCall, ObservedStep, RoleObserver, StepListener

if TYPE_CHECKING:
    from minisgl_core.engine.observer import ViewInPages
    from minisgl_core.plugin_api import AttentionBackend

__all__ = ["AttentionCall", "AttentionObserver", "AttentionStep", "ObservedAttention"]


@dataclass(frozen=True, slots=True)
class AttentionStep(ObservedStep):
    """A step whose rows use N pages of the pool; ``pages`` lists them and, last, the dummy page."""

    view: BatchView
    """In pages of the pool's size"""
    pages: torch.Tensor
    """(N + 1,) int64, ascending"""
    view_in_pages: ViewInPages

    def renumbered(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids of pages of this step as places in :attr:`pages`, int32."""
        return torch.searchsorted(self.pages, ids.long()).to(torch.int32)

    def renumbered_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots of this step, renumbered in the same way."""
        size = self.view.page_size
        return self.renumbered(slots // size) * size + slots % size


@dataclass(frozen=True, slots=True)
class AttentionCall(LayerCall):
    """One layer's call: copies of its inputs and pages."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor


class AttentionObserver(RoleObserver):
    """Wraps the engine's attention backends."""

    def __init__(self, listeners: Sequence[StepListener]) -> None:
        super().__init__(listeners)
        self._pool: KVPool | None = None
        self._view_in_pages: ViewInPages | None = None

    def wrap(self, backend: AttentionBackend, label: str) -> ObservedAttention:
        return ObservedAttention(backend, label, self)

    def bind(self, pool: KVPool, view_in_pages: ViewInPages) -> None:
        """The engine's pool, and how to view a batch in pages of another size."""
        self._pool, self._view_in_pages = pool, view_in_pages

    def step_of(self, number: int, batch: Batch) -> AttentionStep:
        pool, view_in_pages = self._pool, self._view_in_pages
        assert pool is not None and view_in_pages is not None
        view = view_in_pages(batch, pool.page_size)
        return AttentionStep(number, batch, view, _pages_of(view, pool.num_pages), view_in_pages)

    def call_of(
        self, step: AttentionStep, label: str, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> AttentionCall:
        """A layer's inputs and pages, copied."""
        pool = self._pool
        assert pool is not None
        pages = pool.k_cache(layer_id)[step.pages], pool.v_cache(layer_id)[step.pages]
        return AttentionCall(label, layer_id, step.real_tokens, q.clone(), k.clone(), v.clone(), *pages)


def _pages_of(view: BatchView, dummy: int) -> torch.Tensor:
    """The pages that hold live tokens, ascending, then the dummy page."""
    ids = view.page_ids_device
    starts = torch.arange(ids.shape[1], device=ids.device) * view.page_size
    live = torch.unique(ids[starts[None, :] < view.kv_lens_device[:, None]].long())
    return torch.cat((live[live != dummy], torch.tensor([dummy], device=ids.device)))


class ObservedAttention:
    """An ``AttentionBackend`` that calls another one, and the observer in steps that a listener wants."""

    def __init__(self, backend: AttentionBackend, label: str, observer: AttentionObserver) -> None:
        self._backend, self._label, self._observer = backend, label, observer

    def bind_kv(self, pool: KVPool) -> None:
        self._backend.bind_kv(pool)

    def prepare_metadata(self, batch: Any) -> None:
        self._backend.prepare_metadata(batch)

    def update_metadata(self, batch: Any) -> None:
        self._backend.update_metadata(batch)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Any) -> torch.Tensor:
        active = self._observer.active
        if active is None:
            return self._backend.forward(q, k, v, layer_id, batch)
        call = self._observer.call_of(active.step, self._label, layer_id, q, k, v)
        return active.run(call, lambda: self._backend.forward(q, k, v, layer_id, batch))

    def init_capture_graph(self, max_seq_len: int, bs_list: tuple[int, ...]) -> None:
        self._backend.init_capture_graph(max_seq_len, bs_list)

    def prepare_for_capture(self, batch: Any) -> None:
        self._backend.prepare_for_capture(batch)

    def prepare_for_replay(self, batch: Any) -> None:
        self._backend.prepare_for_replay(batch)

    def close(self) -> None:
        self._backend.close()
