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
    """One allocation for all layers. Page ``num_pages`` is the dummy page that padding rows write to."""

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
        # Zeros, not empty: kernels that multiply a page's unused tail by zero need it finite.
        shape = (2, num_layers, num_pages + 1, page_size, kv_heads, head_dim)
        self._storage: torch.Tensor | None = _zeros(shape, dtype, device)
        self._caches = [(self._storage[0, i], self._storage[1, i]) for i in range(num_layers)]

    @staticmethod
    def bytes_per_page(num_layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Keys and values of all layers."""
        return 2 * num_layers * page_size * kv_heads * head_dim * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Of all layers, the dummy page included."""
        return 0 if self._storage is None else self._storage.nbytes

    @property
    def num_tokens(self) -> int:
        """Slots that can be allocated."""
        return self.num_pages * self.page_size

    @property
    def dummy_slot(self) -> int:
        """First slot of the dummy page."""
        return self.num_pages * self.page_size

    def k_cache(self, layer: int) -> torch.Tensor:
        """(P + 1, S, K, D)"""
        return self._caches[layer][0]

    def v_cache(self, layer: int) -> torch.Tensor:
        """(P + 1, S, K, D)"""
        return self._caches[layer][1]

    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every layer's two caches."""
        return self._caches

    def zero_pages(self, pages: np.ndarray) -> None:
        """Zero these pages (N,) int32 in all layers, in stream order."""
        if self._storage is not None:
            self._storage.index_fill_(2, torch.from_numpy(pages).to(self._storage.device, torch.int64), 0)

    def close(self) -> None:
        """Drop the memory."""
        self._storage = None
        self._caches = []


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU the system gives each page of memory only when it is first written.

    torch fills its zeros by hand there, which would touch gigabytes that most runs never need.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


class _RepagedPool:
    """The same memory, seen in smaller pages."""

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
    """The pool as a kernel of smaller pages sees it; ``page_size`` divides the pool's. Slots keep their numbers."""
    return pool if page_size == pool.page_size else _RepagedPool(pool, page_size)
