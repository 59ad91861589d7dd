"""The backend itself: checks nothing per call, moves bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from ..kernels import DEVICES, library
from ..kv_host import match_function
from .launch import INDEX, STORE, CompiledLauncher, Launcher, shape_for, unit_of

if TYPE_CHECKING:
    import numpy as np

    from minisgl_core.plugin_api import KVSetup

__all__ = ["CudaKVKernels"]


class _Handle:
    """A launcher that operations can be told of: they take tensors and numbers only."""

    def __init__(self, launcher: Launcher) -> None:
        self.launch = launcher.launch
        self.number = id(self)
        _HANDLES[self.number] = self


_HANDLES: WeakValueDictionary[int, _Handle] = WeakValueDictionary()
"""Of the backends that are alive, by number."""


def _store(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, handle: int
) -> None:
    tokens = out_loc.shape[0]
    size = k_cache.element_size()
    row = k.shape[1] * k.shape[2] * size
    slots = (k_cache.stride(1) * size, v_cache.stride(1) * size)
    steps = (k.stride(0) * size, v.stride(0) * size)
    if not (tokens and row):
        return
    unit = unit_of(k_cache.data_ptr(), v_cache.data_ptr(), k.data_ptr(), v.data_ptr(), row, *slots, *steps)
    values = (k_cache, v_cache, k, v, out_loc, *slots, *steps, row // unit, tokens)
    _HANDLES[handle].launch(STORE, unit, shape_for(tokens, row // unit), values)


def _index(out: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, start: int, rows: int, handle: int) -> None:
    tokens = ids.shape[0]
    row, step = table.shape[1] * table.element_size(), table.stride(0) * table.element_size()
    if not (tokens and row):
        return
    unit = unit_of(out.data_ptr(), table.data_ptr(), row, step)
    values = (out, table, ids, start, rows, step, row // unit, tokens)
    _HANDLES[handle].launch(INDEX, unit, shape_for(tokens, row // unit), values)


_STORE = library.register(
    "kv_store(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor out_loc, int handle) -> ()",
    _store,
    DEVICES,
)
_INDEX = library.register(
    "kv_index(Tensor(a!) out, Tensor table, Tensor ids, int start, int rows, int handle) -> ()", _index, DEVICES
)


class CudaKVKernels:
    """Any dtype; new rows are converted to the pool's first where they differ.

    ``launcher``: what runs the kernels; by default they are compiled for the platform's GPU.
    """

    def __init__(self, setup: KVSetup, options: object = None, *, launcher: Launcher | None = None) -> None:
        if launcher is None:
            if setup.platform is None:
                raise ValueError("kv:cuda launches on the platform's stream; KVSetup.platform is None")
            launcher = CompiledLauncher(setup.platform)
        self._handle = _Handle(launcher)
        self._match = match_function()

    def store(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor
    ) -> None:
        """Write k and v (T, K, D; any token stride) to slots ``out_loc`` (T,) int32 of (P+1, S, K, D) caches."""
        if k.dtype is not k_cache.dtype:
            k, v = k.to(k_cache.dtype), v.to(v_cache.dtype)
        _STORE(k_cache, v_cache, k, v, out_loc, self._handle.number)

    def index(self, table: torch.Tensor, ids: torch.Tensor, start: int, rows: int) -> torch.Tensor:
        """new (T, N): ``table[ids - start]`` for ids (T,) int32 in [start, start + rows), zeros for the others."""
        out = table.new_empty((ids.shape[0], table.shape[1]))
        _INDEX(out, table, ids, start, rows, self._handle.number)
        return out

    def match_len(self, a: np.ndarray, b: np.ndarray) -> int:
        """Length of the common prefix of two contiguous int32 arrays."""
        return self._match(a, b)

    def close(self) -> None:
        """Holds no memory of its own."""
