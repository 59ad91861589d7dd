"""What the three FlashAttention generations share: everything but the calls.

They run from device tensors alone: no host plan, so a captured step needs nothing but its replay. Shapes: T tokens,
B rows, H query heads, K kv heads, D head_dim, P pages, S page_size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .options import FlashAttentionOptions

if TYPE_CHECKING:
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
        """Nothing to derive, unless a generation needs it."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: BatchLike
    ) -> torch.Tensor:
        """q (T, H, D) -> new (T, H, D), reading keys and values from the pool."""
        run = self._decode if batch.phase == "decode" else self._prefill
        return run(q, *self._caches[layer_id], self._layers[layer_id], batch)

    def _prefill(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, facts: LayerFacts, batch: BatchLike
    ) -> torch.Tensor:
        """The last ``q_len`` tokens of each row, causally: q (T, H, D) -> new (T, H, D)."""
        raise NotImplementedError

    def _decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, facts: LayerFacts, batch: BatchLike
    ) -> torch.Tensor:
        """One token per row: q (B, H, D) -> new (B, H, D)."""
        raise NotImplementedError

    def _window(self, facts: LayerFacts) -> int | None:
        """Keys to the left of a query's own that it sees; None = all of them."""
        if facts.window is None or facts.window >= self._setup.max_seq_len:
            return None
        return facts.window - 1

    @staticmethod
    def _longest(view: BatchView) -> int:
        """Tokens that the page table has room for: what the libraries take for the longest length."""
        return view.page_ids_device.shape[1] * view.page_size

    def init_capture_graph(self, max_seq_len: int, bs_list: tuple[int, ...]) -> None:
        """Nothing to allocate."""

    def prepare_for_capture(self, batch: BatchLike) -> None:
        """Nothing to plan."""

    def prepare_for_replay(self, batch: BatchLike) -> None:
        """Nothing to plan."""

    def close(self) -> None:
        """Let go of the pool."""
        self._caches = []
