"""Ops backend ``cuda``: the operations between the matrix products, fused, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .triton_ops import act, norm, rope, sample

if TYPE_CHECKING:
    import torch

    from minisgl_core.plugin_api import OpsSetup, RopeStoreArgs, SampleArgs, SamplingMode

__all__ = ["CudaOps"]

_MODES: dict[SamplingMode, int] = {"greedy": sample.GREEDY, "random": sample.RANDOM, "filtered": sample.FILTERED}


class CudaOps:
    """Layer operations, computed in float32. ``x``, ``residual`` and ``qkv`` are overwritten where the protocol allows
    it.
    """

    def __init__(self, setup: OpsSetup, options: Any = None) -> None:
        self._all_reduce = setup.comm.all_reduce
        self._split = (setup.q_heads, setup.kv_heads, setup.kv_heads)
        self._heads = (setup.q_heads + 2 * setup.kv_heads, setup.head_dim)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x (T, N) -> new (T, N)."""
        out = x.new_empty(x.shape)
        norm.rms_norm(out, x, weight, eps)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual += x`` and ``x = rms_norm(residual)``, both in place; returns (x, residual)."""
        norm.add_rms_norm(x, residual, weight, eps)
        return x, residual

    def allreduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`add_rms_norm` of x summed over the ranks."""
        return self.add_rms_norm(self._all_reduce(x), residual, weight, eps)

    def qk_norm_rope_store(
        self, qkv: torch.Tensor, args: RopeStoreArgs, positions: torch.Tensor, out_loc: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv (T, (H+2K)*D), changed in place; returns its q (T, H, D), k and v (T, K, D) as views."""
        q_weight, k_weight, eps, cos_sin, k_cache, v_cache = args
        rope.qk_norm_rope_store(qkv, q_weight, k_weight, eps, positions, cos_sin, k_cache, v_cache, out_loc)
        q, k, v = qkv.view(qkv.shape[0], *self._heads).split(self._split, dim=1)
        return q, k, v

    def act_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, 2I) -> new (T, I)."""
        out = x.new_empty((x.shape[0], x.shape[1] // 2))
        act.act_and_mul(out, x)
        return out

    def sample(self, logits: torch.Tensor, args: SampleArgs, mode: SamplingMode) -> torch.Tensor:
        """Logits (B, V) -> ids (B,) int32; a row that holds a NaN gives -1."""
        out = args.top_k.new_empty((logits.shape[0],))
        sample.sample(out, logits, *args, _MODES[mode])
        return out

    def close(self) -> None:
        """Nothing to free."""
