"""FlashInfer attention: one host plan per batch and kind of layer, one run per layer.

Layers that differ in scale, window or softcap need separate plans. Eager batches use the wrappers of their phase in
turn, one set per batch in flight, so that planning the next batch does not overwrite the last one's plan. In a captured
decode step the page list is derived on the device, inside the graph; only the division of work comes from the host, and
all captured sizes share one copy of the page list. Shapes: T tokens, B rows, P pages of a row, S page_size.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import torch

from .options import FlashInferOptions
from .pages import flatten_pages
from .planned import CapturedDecode, EagerDecode, EagerPrefill, HostPages, Planned
from .sizes import decode_partials, use_tensor_cores, workspace_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minisgl_core.plugin_api import AttentionSetup, BatchLike, BatchView, KVPool, LayerFacts

__all__ = ["FlashInferAttention"]

_PLANNED = "attention:flashinfer/planned"
_GRAPH_PLAN_BYTES: Final = 1 << 20
"""Bytes of a captured decode's division of work: a few int32 per tile, and there are about as many tiles as blocks."""


class FlashInferAttention:
    """Prefill and decode through ``BatchPrefillWithPagedKVCacheWrapper`` and ``BatchDecodeWithPagedKVCacheWrapper``."""

    def __init__(self, setup: AttentionSetup, options: FlashInferOptions | None = None) -> None:
        self._setup, self._options = setup, options or FlashInferOptions()
        self._library: Any = import_module("flashinfer")
        layers = [_effective(facts, setup.max_seq_len) for facts in setup.layers]
        self._kinds = list(dict.fromkeys(layers))
        self._kind_of_layer = [self._kinds.index(facts) for facts in layers]
        self._tensor_cores = use_tensor_cores(setup.q_heads // setup.kv_heads, self._options.use_tensor_cores)
        size = workspace_bytes(setup.q_heads, setup.kv_heads, setup.head_dim, self._options.workspace_mib)
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=setup.device)
        turns = range(setup.batches_in_flight)
        self._prefills: Iterator[list[EagerPrefill]] = cycle([[self._prefill(f) for f in self._kinds] for _ in turns])
        self._decodes: Iterator[list[EagerDecode]] = cycle([[self._decode(f) for f in self._kinds] for _ in turns])
        self._graphs: dict[int, list[CapturedDecode]] = {}
        self._graph_plans: list[torch.Tensor] = []
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _prefill(self, facts: LayerFacts) -> EagerPrefill:
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, self._setup.kv_layout, backend=self._options.prefill_backend
        )
        return EagerPrefill(self._setup, facts, wrapper)

    def _decode(self, facts: LayerFacts) -> EagerDecode:
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, self._setup.kv_layout, use_tensor_cores=self._tensor_cores
        )
        return EagerDecode(self._setup, facts, wrapper)

    def bind_kv(self, pool: KVPool) -> None:
        """Keep each layer's (P + 1, S, K, D) caches."""
        self._caches = [(pool.k_cache(layer), pool.v_cache(layer)) for layer in range(len(self._kind_of_layer))]

    # Eager batches.

    def prepare_metadata(self, batch: BatchLike) -> None:
        """Plan once per kind of layer."""
        view = batch.view
        host = HostPages.of(view)
        pages = self._packed_pages(view, host.total)
        planned: list[Any]
        if batch.phase == "decode":
            planned = next(self._decodes)
            for decode in planned:
                decode.plan(host, pages)
        else:
            planned = next(self._prefills)
            for prefill in planned:
                prefill.plan(view.q_lens_host, host, pages)
        batch.scratch[_PLANNED] = planned

    @staticmethod
    def _packed_pages(view: BatchView, total: int) -> torch.Tensor:
        lens = view.kv_lens_device
        pages, indptr, last = lens.new_empty(total), lens.new_empty(lens.shape[0] + 1), torch.empty_like(lens)
        flatten_pages(view.page_ids_device, lens, view.page_size, indptr, pages, last)
        return pages

    def update_metadata(self, batch: BatchLike) -> None:
        """In a captured step: derive the page list from the lengths on the device."""
        if batch.captured:
            view, rows = batch.view, batch.padded_size
            indptr, last = self._indptr[: rows + 1], self._last_page_len[:rows]
            flatten_pages(view.page_ids_device, view.kv_lens_device, view.page_size, indptr, self._pages, last)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: BatchLike
    ) -> torch.Tensor:
        """q (T, H, D) -> new (T, H, D), reading keys and values from the pool."""
        planned: list[Planned] = batch.scratch[_PLANNED]
        return planned[self._kind_of_layer[layer_id]].run(q, self._caches[layer_id])

    # Captured decode.

    def init_capture_graph(self, max_seq_len: int, bs_list: tuple[int, ...]) -> None:
        """Allocate one page list for all sizes and one plan buffer per kind of layer: a stream runs one graph at a
        time.
        """
        rows, device = max(bs_list), self._setup.device
        width = -(-max_seq_len // self._setup.page_size)
        self._indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._pages = torch.zeros(rows * width, dtype=torch.int32, device=device)
        self._last_page_len = torch.zeros(rows, dtype=torch.int32, device=device)
        self._graph_plans = [torch.zeros(_GRAPH_PLAN_BYTES, dtype=torch.uint8, device=device) for _ in self._kinds]
        s = self._setup
        size = decode_partials(rows, s.q_heads, s.kv_heads, s.head_dim) if self._tensor_cores else 0
        too_small = size > self._workspace.numel()
        self._graph_workspace = self._workspace.new_zeros(size) if too_small else self._workspace

    def prepare_for_capture(self, batch: BatchLike) -> None:
        """Plan for rows of one page, as the dummy rows of a capture are. Modes of one size share their wrappers."""
        rows = batch.padded_size
        if rows not in self._graphs:
            self._graphs[rows] = [
                self._captured(facts, buffer, rows)
                for facts, buffer in zip(self._kinds, self._graph_plans, strict=True)
            ]
        one_each = replace(batch.view, kv_lens_host=(1,) * rows)
        for decode in self._graphs[rows]:
            decode.plan(HostPages.of(one_each))
        batch.scratch[_PLANNED] = self._graphs[rows]

    def _captured(self, facts: LayerFacts, plan_buffer: torch.Tensor, rows: int) -> CapturedDecode:
        s = self._setup
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._graph_workspace,
            s.kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=self._indptr[: rows + 1],
            paged_kv_indices_buffer=self._pages,
            paged_kv_last_page_len_buffer=self._last_page_len[:rows],
        )
        wrapper.reset_workspace_buffer(self._graph_workspace, plan_buffer)
        return CapturedDecode(s, facts, wrapper, self._library.fast_decode_plan, self._pages)

    def prepare_for_replay(self, batch: BatchLike) -> None:
        """Divide the work of this batch."""
        host = HostPages.of(batch.view)
        for decode in self._graphs[batch.padded_size]:
            decode.replan(host)

    def close(self) -> None:
        """Release wrappers, buffers and the pool."""
        self._graphs.clear()
        self._graph_plans, self._caches = [], []
        self._prefills, self._decodes = iter(()), iter(())
        self._workspace = self._workspace.new_empty(0)
        self._indptr = self._pages = self._last_page_len = self._graph_workspace = self._workspace


def _effective(facts: LayerFacts, max_seq_len: int) -> LayerFacts:
    """Drop a window that no sequence exceeds: the kernel without a window is prebuilt."""
    hides_something = facts.window is not None and facts.window < max_seq_len
    return facts if hides_something else replace(facts, window=None)
