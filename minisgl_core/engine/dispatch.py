"""The engine's attention: each batch is served by the backend that the plan names for its phase and number of rows.

Shapes: T tokens, H query heads, K kv heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import torch

from minisgl_core.kvcache.pool import repaged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from minisgl_core.core import Batch
    from minisgl_core.plugin_api import AttentionBackend, BatchLike, KVPool, Phase

    from .inputs import BatchInputs

__all__ = ["NO_LIMIT", "AttentionDispatcher", "Route"]

NO_LIMIT: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Route:
    """A backend for the batches of one phase that have at most ``limit`` rows, padding included."""

    backend: AttentionBackend
    page_size: int
    """The pool's, or a divisor of it. The same in every route of one backend."""
    host_plan: bool
    """Whether it needs host work before each replay"""
    limit: int = NO_LIMIT


class AttentionDispatcher:
    """``engine.attn_backend``. ``routes``: by phase, limits ascending, the last without one."""

    def __init__(self, routes: Mapping[Phase, Sequence[Route]]) -> None:
        self.routes = {phase: tuple(some) for phase, some in routes.items()}
        self._inputs: BatchInputs | None = None

    def bind(self, pool: KVPool, inputs: BatchInputs) -> None:
        """The pool is allocated; ``inputs`` derives batches from its device state."""
        self._inputs = inputs
        for route in self._distinct():
            route.backend.bind_kv(repaged(pool, route.page_size))

    def route(self, batch: Batch) -> Route:
        """The first route whose limit holds the batch."""
        for route in self.routes[batch.phase]:
            if batch.padded_size <= route.limit:
                break
        return route

    # Once per batch, on the host.

    def prepare_metadata(self, batch: Batch) -> None:
        """Before an eager step: upload what changed, derive the batch's inputs and view, let the backend plan."""
        if not batch.padded_size:
            batch.padded_size = batch.size
        route = self._assign(batch)
        self._bound.prepare(batch, route.page_size)
        route.backend.prepare_metadata(_for_backends(batch))

    def prepare_for_replay(self, batch: Batch) -> None:
        """Before a replay: the host plan, for backends that have one."""
        route = self.route(batch)
        if route.host_plan:
            batch.view = self._bound.view_for_replay(batch, route.page_size)
            route.backend.prepare_for_replay(_for_backends(batch))

    def prepare_for_capture(self, batch: Batch) -> None:
        """Before a capture: derive the batch once, so that it has a view, and let the backend plan."""
        route = self._assign(batch)
        self._bound.derive_decode(batch, route.page_size, None)
        route.backend.prepare_for_capture(_for_backends(batch))

    def _assign(self, batch: Batch) -> Route:
        """Set the backend that the batch's layers will call themselves."""
        route = self.route(batch)
        batch.attn = route.backend
        return route

    @property
    def _bound(self) -> BatchInputs:
        assert self._inputs is not None
        return self._inputs

    # Once per step, on the device; captured with it.

    def update_metadata(self, batch: Batch) -> None:
        """The device's part of the metadata. A captured step derives its inputs first, an eager one has them."""
        if batch.captured:
            assert batch.view is not None
            self._bound.derive_decode(batch, batch.view.page_size, None)
        batch.attn.update_metadata(_for_backends(batch))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch) -> torch.Tensor:
        """q (T, H, D), k and v (T, K, D) -> new (T, H, D)."""
        out: torch.Tensor = batch.attn.forward(q, k, v, layer_id, batch)
        return out

    # Capture.

    def init_capture_graph(self, max_seq_len: int, bs_list: tuple[int, ...]) -> None:
        """Graphs of these batch sizes will be recorded; each backend receives its own sizes."""
        sizes: dict[int, tuple[AttentionBackend, list[int]]] = {}
        lowest = 1
        for route in self.routes["decode"]:
            mine = [size for size in bs_list if lowest <= size <= route.limit]
            sizes.setdefault(id(route.backend), (route.backend, []))[1].extend(mine)
            lowest = route.limit + 1
        for backend, its_sizes in sizes.values():
            if its_sizes:
                backend.init_capture_graph(max_seq_len, tuple(its_sizes))

    def close(self) -> None:
        """Free the backends."""
        for route in self._distinct():
            route.backend.close()

    def _distinct(self) -> list[Route]:
        """One route of every backend."""
        every = [route for routes in self.routes.values() for route in routes]
        return list({id(route.backend): route for route in every}.values())


def _for_backends(batch: Batch) -> BatchLike:
    """A batch whose inputs and view are derived is what the contract with backends describes."""
    return cast("BatchLike", batch)
