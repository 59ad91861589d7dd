"""Role ``attention``. Shapes: T tokens, H query heads, K kv heads, D head_dim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from .batch import BatchLike, KVPool
    from .platform import Platform

__all__ = ["AttentionBackend", "AttentionSetup", "LayerFacts"]


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What differs between layers. ``window`` w: query i sees keys i-w+1..i; None = all earlier keys."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """What an attention backend is constructed with. Head counts are this rank's, after kv-head replication."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    kv_layout: str
    page_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerFacts, ...]
    max_batch: int
    max_tokens: int
    """Most new tokens of one prefill pass."""
    max_seq_len: int
    batches_in_flight: int
    platform: Platform


class AttentionBackend(Protocol):
    """Paged attention. Built as ``Class(setup, options)`` before the pool is sized; one thread calls it."""

    def bind_kv(self, pool: KVPool) -> None:
        """Receive the pool, once, after it is allocated."""
        ...

    def prepare_metadata(self, batch: BatchLike) -> None:
        """Host work, once per eager batch; ``batch.view`` is filled. Keep state in ``batch.scratch``."""
        ...

    def update_metadata(self, batch: BatchLike) -> None:
        """Device operations, once per step, captured with it."""
        ...

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: BatchLike
    ) -> torch.Tensor:
        """Attend. q (T, H, D) with any token stride; k, v (T, K, D) are this pass's rows, already in the pool.

        Returns a new (T, H, D) tensor. Causal: the last query of a row sees all ``kv_len`` keys.
        """
        ...

    def init_capture_graph(self, max_seq_len: int, bs_list: tuple[int, ...]) -> None:
        """Allocate what graphs of these batch sizes need."""
        ...

    def prepare_for_capture(self, batch: BatchLike) -> None:
        """Host work before the capture of a decode batch of ``batch.padded_size`` rows."""
        ...

    def prepare_for_replay(self, batch: BatchLike) -> None:
        """Host plan before a replay; called only if the caps declare ``host_plan`` for decode."""
        ...

    def close(self) -> None:
        """Free everything; graphs are gone already."""
        ...
