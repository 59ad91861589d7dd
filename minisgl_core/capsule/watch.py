"""Looking over the shoulder of the engine's attention: what a backend is given and returns, layer by layer.

Only eager steps can be watched. Without a watcher the engine's backends are not wrapped, and nothing here runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from minisgl_core.core import Batch
from minisgl_core.plugin_api import BatchView, KVPool, Phase

if TYPE_CHECKING:
    from minisgl_core.plugin_api import AttentionBackend

__all__ = ["AttentionWatch", "LayerCall", "WatchedAttention", "WatchedStep", "Watcher"]

_ACTIVE: Final = "minisgl.watch"
ViewInPages = Callable[[Batch, int], BatchView]


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """One eager step. N pages of the pool hold its rows; ``pages`` has them and, last, the dummy page."""

    number: int
    label: str
    """Of the backend that serves it"""
    batch: Batch
    view: BatchView
    """In pages of the pool's size"""
    pages: torch.Tensor
    """(N + 1,) int64, ascending"""
    view_in_pages: ViewInPages

    @property
    def phase(self) -> Phase:
        return self.batch.phase

    @property
    def uids(self) -> tuple[int, ...]:
        return tuple(req.uid for req in self.batch.reqs)

    @property
    def q_lens(self) -> tuple[int, ...]:
        """(B,) padded rows included"""
        assert self.view.q_lens_host is not None
        return self.view.q_lens_host

    @property
    def real_tokens(self) -> int:
        """Of the rows that are no padding."""
        return sum(self.q_lens[: self.batch.size])

    def renumbered(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids of pages of this step as places in :attr:`pages`, int32."""
        return torch.searchsorted(self.pages, ids.long()).to(torch.int32)

    def renumbered_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """The same for slots."""
        size = self.view.page_size
        return self.renumbered(slots // size) * size + slots % size


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a backend is given for one layer, copied before it runs. Shapes as in :mod:`.format`."""

    layer_id: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor


class Watcher(Protocol):
    """Someone who looks. No method may raise: serving goes on whatever they find."""

    def wants(self, number: int) -> bool:
        """Is this step of interest?"""
        ...

    def begin(self, step: WatchedStep) -> bool:
        """A step of interest has its metadata. False = not this one after all."""
        ...

    def layer(self, step: WatchedStep, call: LayerCall, out: torch.Tensor | None, error: str) -> None:
        """The backend returned ``out`` (T, H, D), or raised ``error``."""
        ...


class AttentionWatch:
    """Wraps the engine's attention backends and counts its eager steps."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = tuple(watchers)
        self._next = 0
        self._wrapped: dict[int, WatchedAttention] = {}
        self._pool: KVPool | None = None
        self._view_in_pages: ViewInPages | None = None

    def wrap(self, backend: AttentionBackend, label: str) -> WatchedAttention:
        """One wrapper per backend."""
        return self._wrapped.setdefault(id(backend), WatchedAttention(backend, label, self))

    def bind(self, pool: KVPool, view_in_pages: ViewInPages) -> None:
        """The engine's pool, and how to see a batch in pages of another size."""
        self._pool, self._view_in_pages = pool, view_in_pages

    def start(self, batch: Batch, label: str) -> _Active | None:
        """An eager step begins; None if nobody looks."""
        number, self._next = self._next, self._next + 1
        wanting = [watcher for watcher in self._watchers if watcher.wants(number)]
        if not wanting:
            return None
        pool, view_in_pages = self._pool, self._view_in_pages
        assert pool is not None and view_in_pages is not None
        view = view_in_pages(batch, pool.page_size)
        pages = _pages_of(view, pool.num_pages)
        step = WatchedStep(number, label, batch, view, pages, view_in_pages)
        watching = [watcher for watcher in wanting if watcher.begin(step)]
        return _Active(step, watching, pool) if watching else None


def _pages_of(view: BatchView, dummy: int) -> torch.Tensor:
    """The pages that hold live tokens, ascending, then the dummy page."""
    ids = view.page_ids_device
    starts = torch.arange(ids.shape[1], device=ids.device) * view.page_size
    live = torch.unique(ids[starts[None, :] < view.kv_lens_device[:, None]].long())
    return torch.cat((live[live != dummy], torch.tensor([dummy], device=ids.device)))


@dataclass(frozen=True, slots=True)
class _Active:
    """A step under watch."""

    step: WatchedStep
    watchers: Sequence[Watcher]
    pool: KVPool

    def before(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> LayerCall:
        pages = self.step.pages
        k_pages, v_pages = self.pool.k_cache(layer_id)[pages], self.pool.v_cache(layer_id)[pages]
        return LayerCall(layer_id, q.clone(), k.clone(), v.clone(), k_pages, v_pages)

    def after(self, call: LayerCall, out: torch.Tensor | None, error: str = "") -> None:
        for watcher in self.watchers:
            watcher.layer(self.step, call, out, error)


class WatchedAttention:
    """An ``AttentionBackend`` that does what another one does, before witnesses."""

    def __init__(self, backend: AttentionBackend, label: str, watch: AttentionWatch) -> None:
        self._backend, self._label, self._watch = backend, label, watch

    def bind_kv(self, pool: KVPool) -> None:
        self._backend.bind_kv(pool)

    def prepare_metadata(self, batch: Any) -> None:
        self._backend.prepare_metadata(batch)

    def update_metadata(self, batch: Any) -> None:
        self._backend.update_metadata(batch)
        if not batch.captured:
            batch.scratch[_ACTIVE] = self._watch.start(batch, self._label)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Any) -> torch.Tensor:
        active: _Active | None = batch.scratch.get(_ACTIVE)
        if active is None:
            return self._backend.forward(q, k, v, layer_id, batch)
        call = active.before(layer_id, q, k, v)
        try:
            out = self._backend.forward(q, k, v, layer_id, batch)
        except Exception as error:
            active.after(call, None, f"{type(error).__name__}: {error}")
            raise
        active.after(call, out)
        return out

    def init_capture_graph(self, max_seq_len: int, bs_list: tuple[int, ...]) -> None:
        self._backend.init_capture_graph(max_seq_len, bs_list)

    def prepare_for_capture(self, batch: Any) -> None:
        self._backend.prepare_for_capture(batch)

    def prepare_for_replay(self, batch: Any) -> None:
        self._backend.prepare_for_replay(batch)

    def close(self) -> None:
        self._backend.close()
