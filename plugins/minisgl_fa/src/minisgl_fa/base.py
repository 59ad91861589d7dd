"""The common part of the three FlashAttention generations: everything except :meth:`forward`.

They read only device tensors. There is no host plan, so a captured step needs only its replay. Shapes: T tokens, B
rows, H query heads, K kv heads, D head_dim, P pages, S page_size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .options import FlashAttentionOptions

if TYPE_CHECKING:
    import torch

    from minisgl_core.plugin_api import AttentionSetup, BatchLike, BatchView, KVPool, LayerFacts

__all__ = ["FlashAttention"]


class FlashAttention:
    """Paged attention over the core's page table, one library call per layer."""

    def __init__(self, setup: AttentionSetup, options: FlashAttentionOptions | None = None) -> None:
        self._options = options or FlashAttentionOptions()
        self._setup = setup
        self._layers = setup.layers
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def bind_kv(self, pool: KVPool) -> None:
        """Keep each layer's (P + 1, S, K, D) caches."""
        self._caches = [(pool.k_cache(layer), pool.v_cache(layer)) for layer in range(len(self._layers))]

    def prepare_metadata(self, batch: BatchLike) -> None:
        """Nothing to plan."""

    def update_metadata(self, batch: BatchLike) -> None:
        """Nothing, unless a generation overrides it."""

    def _window(self, facts: LayerFacts) -> int | None:
        """Number of keys to the left of its own that a query sees; None = all of them."""
        if facts.window is None or facts.window >= self._setup.max_seq_len:
            return None
        return facts.window - 1

    @staticmethod
    def _longest(view: BatchView) -> int:
        """Capacity of the page table in tokens, which the libraries use as the longest length."""
        return view.page_ids_device.shape[1] * view.page_size

    def init_capture_graph(self, max_seq_len: int, bs_list: tuple[int, ...]) -> None:
        """Nothing to allocate."""

    def prepare_for_capture(self, batch: BatchLike) -> None:
        """Nothing to plan."""

    def prepare_for_replay(self, batch: BatchLike) -> None:
        """Nothing to plan."""

    def close(self) -> None:
        """Release the pool."""
        self._caches = []
