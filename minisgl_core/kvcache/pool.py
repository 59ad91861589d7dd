"""The tensors of the paged KV cache of one rank. P pages, S page_size, K kv heads of this rank, D head_dim."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from minisgl_core.plugin_api import KVPool

__all__ = ["PagedKVPool", "repaged"]


class PagedKVPool:
    """The KV pool: one allocation for all layers. Page ``num_pages`` is the dummy page that padding rows write to."""

    layout = "NHD"

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        # Zeros, because kernels that multiply the unused tail of a page by zero need finite values.
        shape = (2, num_layers, num_pages + 1, page_size, kv_heads, head_dim)
        self._storage: torch.Tensor | None = _zeros(shape, dtype, device)
        self._caches = [(self._storage[0, i], self._storage[1, i]) for i in range(num_layers)]

    @staticmethod
    def bytes_per_page(num_layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of a page: keys and values of all layers."""
        return 2 * num_layers * page_size * kv_heads * head_dim * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool: all layers, the dummy page included."""
        return 0 if self._storage is None else self._storage.nbytes

    @property
    def num_tokens(self) -> int:
        """Number of slots that can be allocated."""
        return self.num_pages * self.page_size

    @property
    def dummy_slot(self) -> int:
        """The first slot of the dummy page."""
        return self.num_pages * self.page_size

    def k_cache(self, layer: int) -> torch.Tensor:
        """(P + 1, S, K, D)"""
        return self._caches[layer][0]

    def v_cache(self, layer: int) -> torch.Tensor:
        """(P + 1, S, K, D)"""
        return self._caches[layer][1]

    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The k cache and the v cache of every layer."""
        return self._caches

    def zero_pages(self, pages: np.ndarray) -> None:
        """Zero these pages (N,) int32 in all layers, in stream order."""
        if self._storage is not None:
            self._storage.index_fill_(2, torch.from_numpy(pages).to(self._storage.device, torch.int64), 0)

    def close(self) -> None:
        """Free the memory."""
        self._storage = None
        self._caches = []


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch writes its zeros explicitly, which would touch gigabytes that most runs never use. With numpy the system
    # provides each page of memory at its first write.
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


class _RepagedPool:
    """A view of the pool with smaller pages."""

    def __init__(self, pool: KVPool, page_size: int) -> None:
        self._pool, self.page_size, self.layout = pool, page_size, pool.layout
        self.num_pages = pool.num_pages * (pool.page_size // page_size)

    def k_cache(self, layer: int) -> torch.Tensor:
        return self._cut(self._pool.k_cache(layer))

    def v_cache(self, layer: int) -> torch.Tensor:
        return self._cut(self._pool.v_cache(layer))

    def _cut(self, cache: torch.Tensor) -> torch.Tensor:
        return cache.view(-1, self.page_size, *cache.shape[2:])


def repaged(pool: KVPool, page_size: int) -> KVPool:
    """The pool as seen by a kernel with smaller pages; ``page_size`` must divide the pool's. The slot numbers do not
    change.
    """
    return pool if page_size == pool.page_size else _RepagedPool(pool, page_size)
