"""Attention backend ``cuda_decode``: a split-KV kernel for decode batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl_core.plugin_api import CannotRun, Reason

from .options import DecodeOptions
from .triton_ops.decode import decode_attention
from .triton_ops.dependent import dependent_launch

if TYPE_CHECKING:
    from minisgl_core.plugin_api import AttentionSetup, BatchLike, KVPool

__all__ = ["CudaDecodeAttention", "shared_bytes"]

NO_WINDOW = 2**30
MAX_SPLITS = 64
_KIB = 1024
_SHARED_BYTES = {80: 163 * _KIB, 87: 163 * _KIB, 90: 227 * _KIB, 100: 227 * _KIB, 103: 227 * _KIB, 110: 227 * _KIB}
"""Shared memory that one block may use, by compute capability (CUDA C++ Programming Guide, technical
specifications).
"""
_LEAST_SHARED_BYTES = 99 * _KIB
"""Shared memory on other devices, 8.6, 8.9 and 12.x among them."""


class CudaDecodeAttention:
    """Decode attention without a host plan: lengths and slots are read on the device, so a step costs only the
    launches.
    """

    def __init__(self, setup: AttentionSetup, options: DecodeOptions | None = None) -> None:
        self._s = setup
        chosen = options or DecodeOptions()
        self._splits, self._programs, self._launches = chosen.splits, chosen.programs, chosen.launches
        self._block_t, self._warps, self._stages = _keys_per_step(setup, chosen), chosen.warps, chosen.stages
        self._dependent = dependent_launch(setup.platform.sm, chosen.dependent_launch)
        self._pool: KVPool | None = None
        self._scratch = torch.empty(self._scratch_size(), dtype=torch.float32, device=setup.device)
        self._arrived = torch.zeros(setup.max_batch * setup.kv_heads, dtype=torch.int32, device=setup.device)

    def _scratch_size(self) -> int:
        s = self._s
        sizes = (batch * self.splits_for(batch) for batch in range(1, s.max_batch + 1))
        return max(sizes) * s.q_heads * (s.head_dim + 1)

    def splits_for(self, rows: int) -> int:
        """The number of splits: a power of two that gives every multiprocessor a few programs, independent of the
        lengths.
        """
        if self._splits is not None:
            return self._splits
        splits = 1
        while splits < MAX_SPLITS and rows * self._s.kv_heads * splits * 2 <= self._programs:
            splits *= 2
        return splits

    def joins_inside(self, rows: int) -> bool:
        """True if the last program joins a row's parts, in one launch."""
        return self._launches == 1 or self.splits_for(rows) == 1

    def bind_kv(self, pool: KVPool) -> None:
        """Keep the caches of the pool."""
        self._pool = pool

    def prepare_metadata(self, batch: BatchLike) -> None:
        """Nothing to plan."""

    def update_metadata(self, batch: BatchLike) -> None:
        """Nothing: the view has everything."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: BatchLike
    ) -> torch.Tensor:
        """q (B, H, D) -> new (B, H, D)."""
        assert self._pool is not None
        facts, view, rows = self._s.layers[layer_id], batch.view, q.shape[0]
        out = q.new_empty(q.shape)
        decode_attention(
            out,
            q,
            self._pool.k_cache(layer_id),
            self._pool.v_cache(layer_id),
            *view.slot_table(),
            view.kv_lens_device,
            self._scratch,
            self._arrived if self.joins_inside(rows) else None,
            facts.scale,
            facts.window or NO_WINDOW,
            facts.softcap or 0.0,
            self.splits_for(rows),
            self._block_t,
            self._warps,
            self._stages,
            self._dependent,
        )
        return out

    def init_capture_graph(self, max_seq_len: int, bs_list: tuple[int, ...]) -> None:
        """Nothing to allocate: the scratch space serves every size."""

    def prepare_for_capture(self, batch: BatchLike) -> None:
        """Nothing to plan."""

    def prepare_for_replay(self, batch: BatchLike) -> None:
        """Never called: there is no host plan."""

    def close(self) -> None:
        """Release the references to device memory."""
        self._pool = None
        self._scratch, self._arrived = self._scratch.new_empty(0), self._arrived.new_empty(0)


def shared_bytes(keys: int, head_dim: int, itemsize: int) -> int:
    """Upper bound of the shared memory of the compiled kernel: keys and values of one step, 16 queries, and space for
    reductions.
    """
    width = 1 << (head_dim - 1).bit_length()
    return (2 * keys + 16) * width * itemsize + 9 * _KIB


def _keys_per_step(setup: AttentionSetup, options: DecodeOptions) -> int:
    wanted = options.block_tokens
    if setup.device.type != "cuda":
        return wanted or 64
    room = _SHARED_BYTES.get(setup.platform.sm, _LEAST_SHARED_BYTES)
    fitting = [n for n in (128, 64, 32, 16) if shared_bytes(n, setup.head_dim, setup.kv_dtype.itemsize) <= room]
    if wanted is None:
        return min(64, fitting[0])
    if wanted in fitting:
        return wanted
    raise CannotRun(
        Reason(
            code="unsupported-option",
            field="block_tokens",
            wanted=f"{shared_bytes(wanted, setup.head_dim, setup.kv_dtype.itemsize)} bytes of shared memory",
            supported=f"{room} on compute capability {setup.platform.sm // 10}.{setup.platform.sm % 10}",
            fix=f"at most block_tokens = {fitting[0]}",
        )
    )
