"""The KV backend in CUDA C++."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..kernels import DEVICES, library
from ..kv_host import match_function
from ..launch import Alive, CompiledLauncher, Launcher, Run
from .launch import INDEX, STORE, UNITS, shape_for, unit_of

if TYPE_CHECKING:
    import numpy as np

    from minisgl_core.plugin_api import KVSetup

__all__ = ["CudaKVKernels"]

Prepared = tuple[dict[int, Run], dict[int, Run]]
"""The store and index kernels, by unit."""
_PREPARED: Alive[Prepared] = Alive()


def _store(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, number: int
) -> None:
    tokens, heads, dim = k.shape
    size = k.element_size()
    row = heads * dim * size
    if not (tokens and row):
        return
    tensors = (k_cache, v_cache, k, v, out_loc)
    at = (k_cache.data_ptr(), v_cache.data_ptr(), k.data_ptr(), v.data_ptr())
    slots = (k_cache.stride()[1] * size, v_cache.stride()[1] * size)
    steps = (k.stride()[0] * size, v.stride()[0] * size)
    unit = unit_of(at[0] | at[1] | at[2] | at[3] | row | slots[0] | slots[1] | steps[0] | steps[1])
    run = _PREPARED.find(number)[0][unit]
    run(shape_for(tokens, row // unit), tensors, (*at, out_loc.data_ptr(), *slots, *steps, row // unit, tokens))


def _index(out: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, start: int, rows: int, number: int) -> None:
    tokens, width = out.shape
    size = table.element_size()
    row, step = width * size, table.stride()[0] * size
    if not (tokens and row):
        return
    at = (out.data_ptr(), table.data_ptr())
    unit = unit_of(at[0] | at[1] | row | step)
    run = _PREPARED.find(number)[1][unit]
    values = (*at, ids.data_ptr(), start, rows, step, row // unit, tokens)
    run(shape_for(tokens, row // unit), (out, table, ids), values)


_STORE = library.register(
    "kv_store(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor out_loc, int number) -> ()",
    _store,
    DEVICES,
)
_INDEX = library.register(
    "kv_index(Tensor(a!) out, Tensor table, Tensor ids, int start, int rows, int number) -> ()", _index, DEVICES
)


class CudaKVKernels:
    """KV kernels for any dtype; new rows are converted to the dtype of the pool first.

    ``launcher``: what runs the kernels; by default they are compiled for the platform's GPU.
    """

    def __init__(self, setup: KVSetup, options: object = None, *, launcher: Launcher | None = None) -> None:
        if launcher is None:
            if setup.platform is None:
                raise ValueError("kv:cuda launches on the platform's stream; KVSetup.platform is None")
            launcher = CompiledLauncher(setup.platform)
        prepared = (
            {size: launcher.prepare(STORE, unit) for size, unit in UNITS.items()},
            {size: launcher.prepare(INDEX, unit) for size, unit in UNITS.items()},
        )
        self._number = _PREPARED.add(self, prepared)
        self._match = match_function()

    def store(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor
    ) -> None:
        """Write k and v (T, K, D; any token stride) to slots ``out_loc`` (T,) int32 of (P+1, S, K, D) caches."""
        if k.dtype is not k_cache.dtype:
            k, v = k.to(k_cache.dtype), v.to(v_cache.dtype)
        _STORE(k_cache, v_cache, k, v, out_loc, self._number)

    def index(self, table: torch.Tensor, ids: torch.Tensor, start: int, rows: int) -> torch.Tensor:
        """new (T, N): ``table[ids - start]`` for ids (T,) int32 in [start, start + rows), zeros for the others."""
        out = table.new_empty((ids.shape[0], table.shape[1]))
        _INDEX(out, table, ids, start, rows, self._number)
        return out

    def match_len(self, a: np.ndarray, b: np.ndarray) -> int:
        """Length of the common prefix of two contiguous int32 arrays."""
        return self._match(a, b)

    def close(self) -> None:
        """Nothing to free."""
