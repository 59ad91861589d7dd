"""A second attention backend on the pool of the one that serves."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from minisgl_core.kvcache.pool import repaged
from minisgl_core.plugin_api import AttentionBackend, BatchView, KVPool, Phase
from minisgl_core.testing.device_fixture import KitBatch

if TYPE_CHECKING:
    from .observer import AttentionCall, AttentionStep

__all__ = ["AttentionCandidate", "PhaseBackend"]


@dataclass(frozen=True, slots=True)
class PhaseBackend:
    """An instance of the candidate for one phase. One that serves both phases may be given twice."""

    backend: AttentionBackend
    page_size: int
    label: str


class AttentionCandidate:
    """A :class:`~minisgl_core.capsule.shadow.Candidate`.

    It gets copies of everything that it could write to except the pool; pages that it changes there are found and put
    back.
    """

    def __init__(self, backends: Mapping[Phase, PhaseBackend], needs_finite_tail: bool, tolerance: float) -> None:
        self._backends, self.needs_finite_tail, self.tolerance = dict(backends), needs_finite_tail, tolerance
        self._pool: KVPool | None = None
        self._batch: KitBatch | None = None
        self.label = ", ".join(dict.fromkeys(item.label for item in self._backends.values()))

    def bind(self, pool: KVPool) -> None:
        """Every instance gets the engine's pool, in its own page size."""
        self._pool = pool
        for item in self._distinct():
            item.backend.bind_kv(repaged(pool, item.page_size))

    def prepare_weights(self, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Attention has no weights."""

    def _distinct(self) -> list[PhaseBackend]:
        return list({id(item.backend): item for item in self._backends.values()}.values())

    def begin(self, step: AttentionStep) -> bool:
        item = self._backends.get(step.phase)
        if item is None:
            return False
        self._batch = _batch_of(step, item.page_size)
        item.backend.prepare_metadata(self._batch)
        item.backend.update_metadata(self._batch)
        return True

    def forward(self, step: AttentionStep, call: AttentionCall) -> Any:
        backend, batch = self._backends[step.phase].backend, self._batch
        assert batch is not None
        return backend.forward(call.q.clone(), call.k.clone(), call.v.clone(), call.layer_id, batch)

    def restore(self, step: AttentionStep, call: AttentionCall) -> str:
        pool, changed = self._pool, False
        assert pool is not None
        for cache, before in ((pool.k_cache, call.k_pages), (pool.v_cache, call.v_pages)):
            pages = cache(call.layer_id)
            now = pages[step.pages]
            if not torch.equal(now.view(torch.uint8), before.view(torch.uint8)):
                pages[step.pages] = before
                changed = True
        return "it wrote to the KV pool, which a backend must never do; the pages are put back" if changed else ""

    def close(self) -> None:
        with ExitStack() as stack:
            for item in self._distinct():
                stack.callback(item.backend.close)


def _batch_of(step: AttentionStep, page_size: int) -> KitBatch:
    """The candidate's own batch, which it may change."""
    batch = step.batch
    assert batch.positions is not None and batch.out_loc is not None
    view = step.view_in_pages(batch, page_size)
    values = {item.name: getattr(view, item.name) for item in fields(BatchView)}
    copies: dict[str, Any] = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()
    }
    return KitBatch(
        phase=step.phase,
        size=batch.size,
        padded_size=batch.padded_size,
        view=BatchView(**copies),
        positions=batch.positions.clone(),
        out_loc=batch.out_loc.clone(),
        mode=batch.mode,
    )
