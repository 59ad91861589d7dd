"""FlashAttention 2 on Ampere and Ada: pages that are multiples of 256."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from .base import FlashAttention

if TYPE_CHECKING:
    from minisgl_core.plugin_api import AttentionSetup, BatchLike, LayerFacts

    from .options import FlashAttentionOptions

__all__ = ["FlashAttention2"]

_CU_KV = "attention:fa/cu_kv"


class FlashAttention2(FlashAttention):
    """``flash_attn_varlen_func`` for prefill, ``flash_attn_with_kvcache`` for decode."""

    def __init__(self, setup: AttentionSetup, options: FlashAttentionOptions | None = None) -> None:
        super().__init__(setup, options)
        self._library: Any = import_module("flash_attn.flash_attn_interface")

    def update_metadata(self, batch: BatchLike) -> None:
        """Compute the kv lengths as a prefix sum (B+1), for prefill."""
        if batch.phase == "prefill":
            sums = batch.view.kv_lens_device.cumsum(0, dtype=torch.int32)
            batch.scratch[_CU_KV] = functional.pad(sums, (1, 0))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: BatchLike
    ) -> torch.Tensor:
        """q (T, H, D) -> new (T, H, D), reading keys and values from the pool."""
        run = self._decode if batch.phase == "decode" else self._prefill
        return run(q, *self._caches[layer_id], self._layers[layer_id], batch)

    def _prefill(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, facts: LayerFacts, batch: BatchLike
    ) -> torch.Tensor:
        view = batch.view
        out: torch.Tensor = self._library.flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            view.cu_q_device,
            batch.scratch[_CU_KV],
            view.max_q,
            view.max_kv,
            softmax_scale=facts.scale,
            causal=True,
            window_size=self._window_size(facts),
            softcap=facts.softcap or 0.0,
            block_table=view.page_ids_device,
        )
        return out

    def _decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, facts: LayerFacts, batch: BatchLike
    ) -> torch.Tensor:
        view = batch.view
        out: torch.Tensor = self._library.flash_attn_with_kvcache(
            q[:, None],
            k_cache,
            v_cache,
            cache_seqlens=view.kv_lens_device,
            block_table=view.page_ids_device,
            softmax_scale=facts.scale,
            causal=True,
            window_size=self._window_size(facts),
            softcap=facts.softcap or 0.0,
            num_splits=self._options.decode_num_splits,
        )
        return out[:, 0]

    def _window_size(self, facts: LayerFacts) -> tuple[int, int]:
        left = self._window(facts)
        return (-1, -1) if left is None else (left, 0)
