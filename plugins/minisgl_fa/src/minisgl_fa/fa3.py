"""FlashAttention 3 on Hopper: any page size, split-KV decode, packed GQA.

The kernels zero-fill what they load beyond a row's end, with one exception: prefill over pages that are a multiple of
its key block goes through TMA, which brings in whole pages. Their unused tail is multiplied by zero and must be finite.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import FlashAttention

if TYPE_CHECKING:
    import torch

    from minisgl_core.plugin_api import AttentionSetup, BatchLike, LayerFacts

    from .options import FlashAttentionOptions

__all__ = ["FlashAttention3"]

_SCHEDULES = "attention:fa/schedules"
_UNPAGED = "attention:fa/unpaged"
_UNBOUNDED = (-1, -1)


class FlashAttention3(FlashAttention):
    """``flash_attn_interface``: ``flash_attn_with_kvcache``, and ``flash_attn_varlen_func`` where all keys are new."""

    def __init__(self, setup: AttentionSetup, options: FlashAttentionOptions | None = None) -> None:
        super().__init__(setup, options)
        self._library: Any = import_module("flash_attn_interface")
        self._windows = {self._window_size(facts) for facts in setup.layers}

    def prepare_metadata(self, batch: BatchLike) -> None:
        """Has no row of a prefill pass anything in the pool? Then its keys need not be fetched from there."""
        view = batch.view
        fresh = batch.phase == "prefill" and view.q_lens_host is not None and view.q_lens_host == view.kv_lens_host
        batch.scratch[_UNPAGED] = fresh and self._options.unpaged_prefill

    def update_metadata(self, batch: BatchLike) -> None:
        """One tile schedule per distinct window; the layers of the step share it."""
        if self._options.schedule_once and not batch.scratch.get(_UNPAGED):
            batch.scratch[_SCHEDULES] = {window: self._schedule(batch, window) for window in self._windows}

    def _schedule(self, batch: BatchLike, window: tuple[int, int]) -> torch.Tensor:
        # Every argument must be what the call itself will be told or find out, or the schedule is for another kernel.
        s, view = self._setup, batch.view
        decode = batch.phase == "decode"
        schedule: torch.Tensor = self._library.get_scheduler_metadata(
            view.kv_lens_device.shape[0],
            1 if decode else view.max_q,
            self._longest(view),
            s.q_heads,
            s.kv_heads,
            s.head_dim,
            view.kv_lens_device,
            qkv_dtype=s.dtype,
            cu_seqlens_q=None if decode else view.cu_q_device,
            page_size=view.page_size,
            causal=not decode,
            window_size=window,
            num_splits=self._num_splits(decode),
            pack_gqa=self._options.pack_gqa,
        )
        return schedule

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: BatchLike
    ) -> torch.Tensor:
        """q (T, H, D) -> new (T, H, D); keys and values come from the pool unless the pass has all of them."""
        if not batch.scratch.get(_UNPAGED):
            return super().forward(q, k, v, layer_id, batch)
        facts, view = self._layers[layer_id], batch.view
        out: torch.Tensor = self._library.flash_attn_varlen_func(
            q,
            k,
            v,
            view.cu_q_device,
            view.cu_q_device,
            view.max_q,
            view.max_q,
            softmax_scale=facts.scale,
            causal=True,
            window_size=self._window_size(facts),
            num_splits=self._options.prefill_num_splits,
            pack_gqa=self._options.pack_gqa,
        )
        return out

    def _prefill(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, facts: LayerFacts, batch: BatchLike
    ) -> torch.Tensor:
        view = batch.view
        return self._call(q, k_cache, v_cache, facts, batch, cu_seqlens_q=view.cu_q_device, max_seqlen_q=view.max_q)

    def _decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, facts: LayerFacts, batch: BatchLike
    ) -> torch.Tensor:
        return self._call(q[:, None], k_cache, v_cache, facts, batch)[:, 0]

    def _call(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        facts: LayerFacts,
        batch: BatchLike,
        **queries: Any,
    ) -> torch.Tensor:
        decode, window = batch.phase == "decode", self._window_size(facts)
        out: torch.Tensor = self._library.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=batch.view.kv_lens_device,
            page_table=batch.view.page_ids_device,
            softmax_scale=facts.scale,
            causal=not decode,  # the one query of a decode row sees every key
            window_size=window,
            scheduler_metadata=batch.scratch[_SCHEDULES][window] if self._options.schedule_once else None,
            num_splits=self._num_splits(decode),
            pack_gqa=self._options.pack_gqa,
            **queries,
        )
        return out

    def _num_splits(self, decode: bool) -> int:
        return self._options.decode_num_splits if decode else self._options.prefill_num_splits

    def _window_size(self, facts: LayerFacts) -> tuple[int, int]:
        left = self._window(facts)
        return _UNBOUNDED if left is None else (left, 0)
