"""KV backend ``cuda`` in Triton, for machines without nvcc."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .kv_host import match_function
from .triton_ops import kv

if TYPE_CHECKING:
    import numpy as np
    import torch

    from minisgl_core.plugin_api import KVSetup

__all__ = ["TritonKVKernels"]


class TritonKVKernels:
    """KV kernels for any dtype; new rows are converted to the dtype of the pool first."""

    def __init__(self, setup: KVSetup, options: object = None) -> None:
        self._match = match_function()

    def store(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor
    ) -> None:
        """Write k and v (T, K, D; any token stride) to slots ``out_loc`` (T,) int32 of (P+1, S, K, D) caches."""
        if k.dtype is not k_cache.dtype:
            k, v = k.to(k_cache.dtype), v.to(v_cache.dtype)
        kv.store(k_cache, v_cache, k, v, out_loc)

    def index(self, table: torch.Tensor, ids: torch.Tensor, start: int, rows: int) -> torch.Tensor:
        """new (T, N): ``table[ids - start]`` for ids (T,) int32 in [start, start + rows), zeros for the others."""
        out = table.new_empty((ids.shape[0], table.shape[1]))
        kv.index(out, table, ids, start, rows)
        return out

    def match_len(self, a: np.ndarray, b: np.ndarray) -> int:
        """Length of the common prefix of two contiguous int32 arrays."""
        return self._match(a, b)

    def close(self) -> None:
        """Nothing to free."""
