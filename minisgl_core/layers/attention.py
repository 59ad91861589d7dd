"""Self-attention: merged projection, fused norm + rotary + store, the chosen attention backend, output projection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl_core.plugin_api import RopeStoreArgs

from .base import Layer
from .linear import QKVLinear, RowLinear
from .norm import RMSNorm

if TYPE_CHECKING:
    from minisgl_core.core import Batch, Context

__all__ = ["Attention"]


class Attention(Layer):
    """The attention of one layer. All layers share ``cos_sin`` (max_seq_len, R) float32."""

    def __init__(self, ctx: Context, layer_id: int, cos_sin: torch.Tensor) -> None:
        c = ctx.config
        self._ctx, self._layer, self._cos_sin, self._eps = ctx, layer_id, cos_sin, c.rms_norm_eps
        self._norm_rope_store = ctx.ops.qk_norm_rope_store
        self.qkv_proj = QKVLinear(ctx, c.hidden_size, c.num_q_heads, c.num_kv_heads, c.head_dim, c.qkv_bias)
        self.q_norm = RMSNorm(ctx, c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(ctx, c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.o_proj = RowLinear(ctx, c.hidden_size, c.num_q_heads * c.head_dim, c.o_bias)
        self._rope_store_args: RopeStoreArgs | None = None

    def bind_kv(self) -> None:
        """The pool is allocated: from now on K and V go to this layer's two caches."""
        pool = self._ctx.pool
        if pool is not None:
            self._rope_store_args = RopeStoreArgs(
                None if self.q_norm is None else self.q_norm.weight,
                None if self.k_norm is None else self.k_norm.weight,
                self._eps,
                self._cos_sin,
                pool.k_cache(self._layer),
                pool.v_cache(self._layer),
            )

    def fuse_norm(self, norm: RMSNorm) -> None:
        """As :meth:`Linear.fuse_norm`."""
        self.qkv_proj.fuse_norm(norm)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, batch: Batch, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the norm returned, (T, hidden) each -> (new (T, hidden), still to be summed over ranks; residual).

        ``rows`` (B,): the only tokens whose result is needed; both results then have B rows.
        """
        assert self._rope_store_args is not None and batch.positions is not None and batch.out_loc is not None
        qkv, residual = self.qkv_proj.forward_normed(x, residual)
        q, k, v = self._norm_rope_store(qkv, self._rope_store_args, batch.positions, batch.out_loc)
        heads: torch.Tensor = batch.attn.forward(q, k, v, self._layer, batch)
        heads = heads.flatten(1)
        if rows is not None:
            heads, residual = heads.index_select(0, rows), residual.index_select(0, rows)
        return self.o_proj.partial(heads), residual
