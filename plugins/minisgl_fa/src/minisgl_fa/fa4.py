"""FlashAttention 4 (CuTe DSL) on Blackwell: pages of 128."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import FlashAttention

if TYPE_CHECKING:
    import torch

    from minisgl_core.plugin_api import AttentionSetup, BatchLike

    from .options import FlashAttentionOptions

__all__ = ["FlashAttention4"]


class FlashAttention4(FlashAttention):
    """``flash_attn.cute.flash_attn_varlen_func`` for both phases: a decode step is a batch of rows of one query."""

    def __init__(self, setup: AttentionSetup, options: FlashAttentionOptions | None = None) -> None:
        super().__init__(setup, options)
        self._attend: Any = import_module("flash_attn.cute").flash_attn_varlen_func

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: BatchLike
    ) -> torch.Tensor:
        """q (T, H, D) -> new (T, H, D), reading keys and values from the pool."""
        facts, (k_cache, v_cache) = self._layers[layer_id], self._caches[layer_id]
        view, left = batch.view, self._window(facts)
        decode = batch.phase == "decode"
        out, _ = self._attend(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=view.cu_q_device,
            max_seqlen_q=view.max_q,
            max_seqlen_k=self._longest(view),
            seqused_k=view.kv_lens_device,
            page_table=view.page_ids_device,
            softmax_scale=facts.scale,
            causal=True,
            window_size=(left, None if left is None else 0),
            softcap=facts.softcap or 0.0,
            num_splits=self._options.decode_num_splits if decode else self._options.prefill_num_splits,
            pack_gqa=self._options.pack_gqa,
        )
        result: torch.Tensor = out
        return result
