"""``kv:cpu``: rows moved as bytes."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from minisgl_core.plugin_api import KVSetup

from .build import library
from .entry import Entry, kernel, threads

__all__ = ["NativeKV"]

_MATCH = Entry("minisgl_match_len", "2PqP")


def _store(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor
) -> tuple[float, ...]:
    size = k_cache.element_size()
    return (
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out_loc.data_ptr(),
        k_cache.stride(1) * size,
        k.stride(0) * size,
        v.stride(0) * size,
        k.shape[1] * k.shape[2] * size,
        k.shape[0],
        threads(),
    )


def _index(out: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, start: int, rows: int) -> tuple[float, ...]:
    size = table.element_size()
    return (
        table.data_ptr(),
        ids.data_ptr(),
        out.data_ptr(),
        table.stride(0) * size,
        table.shape[1] * size,
        start,
        rows,
        ids.shape[0],
        threads(),
    )


_STORE_OP = kernel(
    "store(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor out_loc) -> ()",
    "minisgl_store",
    "5P6q",
    _store,
)
_INDEX_OP = kernel(
    "index(Tensor(a!) out, Tensor table, Tensor ids, int start, int rows) -> ()", "minisgl_index", "3P6q", _index
)


class NativeKV:
    """KV kernels for any dtype; new rows are converted to the dtype of the pool first."""

    def __init__(self, setup: KVSetup, options: object = None) -> None:
        library()

    def store(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor
    ) -> None:
        """Write k and v (T, K, D; any token stride) to slots ``out_loc`` (T,) int32 of (P+1, S, K, D) caches."""
        if k.dtype is not k_cache.dtype:
            k, v = k.to(k_cache.dtype), v.to(v_cache.dtype)
        _STORE_OP(k_cache, v_cache, k, v, out_loc)

    def index(self, table: torch.Tensor, ids: torch.Tensor, start: int, rows: int) -> torch.Tensor:
        """new (T, N): ``table[ids - start]`` for ids (T,) int32 in [start, start + rows), zeros for the others."""
        out = table.new_empty((ids.shape[0], table.shape[1]))
        _INDEX_OP(out, table, ids, start, rows)
        return out

    def match_len(self, a: np.ndarray, b: np.ndarray) -> int:
        """Length of the common prefix of two contiguous int32 arrays."""
        out = ctypes.c_int64()
        _MATCH.call(_MATCH.pack(a.ctypes.data, b.ctypes.data, min(len(a), len(b)), ctypes.addressof(out)))
        return out.value

    def close(self) -> None:
        """Nothing to free."""
