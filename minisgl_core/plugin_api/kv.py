"""Role ``kv``: moving rows into and out of paged and vocabulary-parallel tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .platform import Platform

__all__ = ["KVKernels", "KVSetup"]


@dataclass(frozen=True, slots=True)
class KVSetup:
    """What a KV kernel backend is constructed with."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    kv_heads: int
    head_dim: int
    platform: Platform | None = None
    """Kernels that are launched outside torch ask it for the stream; absent only where a backend is driven by hand."""


class KVKernels(Protocol):
    """Row scatter and gather. Built as ``Class(setup, options)``."""

    def store(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor
    ) -> None:
        """Write k and v (T, K, D; any token stride) to slots ``out_loc`` (T,) int32 of (P+1, S, K, D) caches."""
        ...

    def index(self, table: torch.Tensor, ids: torch.Tensor, start: int, rows: int) -> torch.Tensor:
        """Rows of this rank's part of a vocabulary table: new (T, N) = ``table[ids - start]`` where
        ``start <= ids < start + rows``, else zeros. ids (T,) int32.
        """
        ...

    def match_len(self, a: np.ndarray, b: np.ndarray) -> int:
        """Length of the common prefix of two contiguous int32 host arrays (for the radix tree)."""
        ...

    def close(self) -> None: ...
