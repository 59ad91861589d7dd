"""The engine's attention: derives each batch's view once, then calls the backend that the plan names for its phase and
number of rows.

Shapes: T tokens, B rows (padding included), P pages of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, cast

import torch

from minisgl_core.kvcache.pool import repaged
from minisgl_core.plugin_api import BatchView

from .scoring import find_scored
from .state import HandSet
from .view import DerivedView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from minisgl_core.core import Batch
    from minisgl_core.plugin_api import AttentionBackend, BatchLike, KVPool, Phase

    from .state import DecodeState

__all__ = ["NO_LIMIT", "AttentionDispatcher", "Route"]

NO_LIMIT: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Route:
    """A backend, for the batches of one phase that have at most ``limit`` rows, padding included."""

    backend: AttentionBackend
    page_size: int
    """Of its kernels: the pool's, or a divisor of it. The same in every route of one backend."""
    host_plan: bool
    """Does it need host work before each replay?"""
    limit: int = NO_LIMIT


class AttentionDispatcher:
    """What ``engine.attn_backend`` is. ``routes``: by phase, limits ascending, the last without one."""

    def __init__(self, routes: Mapping[Phase, Sequence[Route]], max_seq_len: int) -> None:
        self.routes = {phase: tuple(some) for phase, some in routes.items()}
        self._max_seq_len = max_seq_len
        self._state: DecodeState | None = None
        self._dummy_slot = 0

    def bind(self, pool: KVPool, state: DecodeState) -> None:
        """The pool and the device state exist now."""
        self._state, self._dummy_slot = state, pool.num_pages * pool.page_size
        for route in self._distinct():
            route.backend.bind_kv(repaged(pool, route.page_size))

    def _choose(self, batch: Batch) -> Route:
        """The batch's route. Its layers then call that backend without asking again."""
        rows = batch.padded_size
        for route in self.routes[batch.phase]:
            if rows <= route.limit:
                break
        batch.attn = route.backend
        return route

    # Once per eager batch, on the host.

    def prepare_metadata(self, batch: Batch) -> None:
        """Upload what changed, derive the batch's inputs and view, let the backend plan."""
        assert self._state is not None
        if not batch.padded_size:
            batch.padded_size = batch.size
        if batch.is_prefill:
            self._derive_prefill(batch)
        else:
            self._state.prepare_decode(batch)
            self.derive_decode(batch, self._lens_host(batch))
        batch.attn.prepare_metadata(_for_backends(batch))

    def prepare_for_replay(self, batch: Batch) -> None:
        """The host plan before a replay, for backends that have one."""
        route = self._choose(batch)
        if route.host_plan:
            lens = self._lens_host(batch)
            batch.view = self._decode_view(batch, lens, lambda: self._state_of(batch)[1], route.page_size)
            batch.attn.prepare_for_replay(_for_backends(batch))

    def _lens_host(self, batch: Batch) -> tuple[int, ...]:
        return (*batch.device_lens().tolist(), *(1,) * (batch.padded_size - batch.size))

    def _derive_prefill(self, batch: Batch) -> None:
        state = self._state
        assert state is not None
        device_lens, device = batch.device_lens(), state.lengths.device
        q_lens_host: tuple[int, ...] = tuple((device_lens - batch.cached_lens()).tolist())
        kv_lens_host: tuple[int, ...] = tuple(device_lens.tolist())
        total = sum(q_lens_host)
        # Copied before the upload: they may be views of what this pass or one that is prepared after it changes.
        given = HandSet.of(batch, total, device)
        sent = state.upload_prefill(batch)
        rows, places = sent.rows, sent.places
        if given.positions is not None:
            places = places + (given.positions - sent.positions)
        batch.rows = rows
        batch.positions = sent.positions if given.positions is None else given.positions
        batch.input_ids = sent.input_ids if given.input_ids is None else given.input_ids
        table = state.page_table.view(-1)
        if given.out_loc is None:
            batch.out_loc = table.index_select(0, places)
        else:
            batch.out_loc = given.out_loc
            table.index_put_((places,), given.out_loc)
        batch.last_rows = sent.last_rows.to(torch.int64)
        max_kv = max(kv_lens_host)
        page_size = self._choose(batch).page_size
        batch.view = DerivedView(
            q_lens_host,
            kv_lens_host,
            max(q_lens_host),
            max_kv,
            sent.cu_q,
            sent.kv_lens,
            lambda lens: self._page_ids(rows, lens, max_kv, page_size),
            page_size,
            state.page_table,
            rows,
        )
        batch.scored = find_scored(batch, state)  # last: its upload ends the life of what was sent before

    # Device work: inside the step when captured.

    def derive_decode(self, batch: Batch, lens_host: tuple[int, ...] | None) -> None:
        """Inputs and view of a decode batch from the device state alone; ``lens_host`` None = captured."""
        state = self._state
        assert state is not None and batch.rows is not None
        batch.positions, kv_lens = self._state_of(batch)
        batch.input_ids = state.last_token.index_select(0, batch.rows)
        places = torch.add(batch.positions, batch.rows, alpha=state.width)
        batch.out_loc = state.page_table.view(-1).index_select(0, places)
        batch.last_rows = None
        batch.view = self._decode_view(batch, lens_host, kv_lens, self._choose(batch).page_size)

    def _state_of(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(B,) positions of a decode batch's tokens, and (B,) its lengths with them."""
        assert self._state is not None and batch.rows is not None
        # index_select, unlike indexing, takes int32 as it is.
        positions = self._state.lengths.index_select(0, batch.rows)
        return positions, positions + 1

    def _decode_view(
        self,
        batch: Batch,
        lens_host: tuple[int, ...] | None,
        kv_lens: torch.Tensor | Callable[[], torch.Tensor],
        page_size: int,
    ) -> BatchView:
        state, rows = self._state, batch.rows
        assert state is not None and rows is not None
        max_kv = self._max_seq_len if lens_host is None else max(lens_host)
        return DerivedView(
            None if lens_host is None else (1,) * batch.padded_size,
            lens_host,
            1,
            max_kv,
            state.iota[: batch.padded_size + 1],
            kv_lens,
            lambda lens: self._page_ids(rows, lens, max_kv, page_size),
            page_size,
            state.page_table,
            rows,
        )

    def view_in_pages(self, batch: Batch, page_size: int) -> BatchView:
        """An eager batch's view, its pages counted in another size; its other tensors are shared."""
        view, rows = batch.view, batch.rows
        assert view is not None and rows is not None
        ids = self._page_ids(rows, view.kv_lens_device, view.max_kv, page_size)
        return replace(view, page_ids_device=ids, page_size=page_size)

    def _page_ids(self, rows: torch.Tensor, kv_lens: torch.Tensor, max_kv: int, size: int) -> torch.Tensor:
        """(B, P): the page of every S-th position below each row's length, the dummy page after it."""
        assert self._state is not None
        pages = -(-max_kv // size)
        slots = self._state.page_table[:, : pages * size : size].index_select(0, rows)
        ids = slots if size == 1 else slots.floor_divide_(size)
        starts = torch.arange(0, pages * size, size, dtype=torch.int32, device=kv_lens.device)
        return ids.masked_fill_(starts[None, :] >= kv_lens[:, None], self._dummy_slot // size)

    def update_metadata(self, batch: Batch) -> None:
        """Device operations once per step, captured with it."""
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

    def prepare_for_capture(self, batch: Batch) -> None:
        """Host work before a capture; the batch has a view."""
        batch.attn.prepare_for_capture(_for_backends(batch))

    def close(self) -> None:
        """Free the backends."""
        for route in self._distinct():
            route.backend.close()

    def _distinct(self) -> list[Route]:
        """One route of every backend."""
        every = [route for routes in self.routes.values() for route in routes]
        return list({id(route.backend): route for route in every}.values())


def _for_backends(batch: Batch) -> BatchLike:
    """A batch whose inputs and view are derived is what backends are promised."""
    return cast("BatchLike", batch)
