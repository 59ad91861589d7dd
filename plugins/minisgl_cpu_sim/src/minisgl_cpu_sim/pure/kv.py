"""``kv:torch``: row scatter and gather in plain torch, on any device."""

from __future__ import annotations

import numpy as np
import torch

from minisgl_core.plugin_api import KVSetup

__all__ = ["TorchKV"]


class TorchKV:
    """Index operations on the pool and on vocabulary tables."""

    def __init__(self, setup: KVSetup, options: object = None) -> None:
        del setup, options

    def store(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor
    ) -> None:
        """Write k and v (T, K, D) to slots ``out_loc`` (T,) of (P+1, S, K, D) caches."""
        slots = out_loc.long()
        k_cache.view(-1, *k.shape[1:])[slots] = k.to(k_cache.dtype)
        v_cache.view(-1, *v.shape[1:])[slots] = v.to(v_cache.dtype)

    def index(self, table: torch.Tensor, ids: torch.Tensor, start: int, rows: int) -> torch.Tensor:
        """new (T, N): ``table[ids - start]`` for ids in [start, start + rows), zeros for the others."""
        local = ids.long() - start
        foreign = (local < 0) | (local >= rows)
        found = table[local.masked_fill(foreign, 0)]
        # Multiplying by 0 would keep NaN or inf of the row that was read for a foreign id.
        return found.masked_fill_(foreign[:, None], 0)

    def match_len(self, a: np.ndarray, b: np.ndarray) -> int:
        """Length of the common prefix of two int32 arrays."""
        shared = min(len(a), len(b))
        different = np.flatnonzero(a[:shared] != b[:shared])
        return int(different[0]) if len(different) else shared

    def close(self) -> None:
        """Nothing to free."""
