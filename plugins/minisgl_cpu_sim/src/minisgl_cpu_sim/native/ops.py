"""``ops:cpu``: the operations between the matrix products, each one native pass."""

from __future__ import annotations

import torch

from minisgl_core.plugin_api import OpsSetup, RopeStoreArgs, SampleArgs, SamplingMode

from .build import library
from .entry import DTYPE_CODES, kernel, threads

__all__ = ["NativeOps"]

_MODES: dict[SamplingMode, int] = {"greedy": 0, "random": 1, "filtered": 2}


def _rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[float, ...]:
    tokens, width = x.shape
    return (
        x.data_ptr(),
        0,
        weight.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        0,
        out.stride(0),
        tokens,
        width,
        DTYPE_CODES[x.dtype],
        threads(),
        eps,
    )


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[float, ...]:
    tokens, width = x.shape
    at = x.data_ptr()
    stride = x.stride(0)
    return (
        at,
        residual.data_ptr(),
        weight.data_ptr(),
        at,
        stride,
        residual.stride(0),
        stride,
        tokens,
        width,
        DTYPE_CODES[x.dtype],
        threads(),
        eps,
    )


def _qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_loc: torch.Tensor,
) -> tuple[float, ...]:
    tokens, width = qkv.shape
    _, slot, head, _ = k_cache.stride()
    kv_heads, dim = k_cache.shape[2:]
    return (
        qkv.data_ptr(),
        0 if q_weight is None else q_weight.data_ptr(),
        0 if k_weight is None else k_weight.data_ptr(),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        out_loc.data_ptr(),
        qkv.stride(0),
        cos_sin.stride(0),
        slot,
        head,
        tokens,
        width // dim - 2 * kv_heads,
        kv_heads,
        dim,
        cos_sin.shape[1],
        DTYPE_CODES[qkv.dtype],
        DTYPE_CODES[k_cache.dtype],
        threads(),
        eps,
    )


def _act_and_mul(out: torch.Tensor, x: torch.Tensor) -> tuple[float, ...]:
    tokens, width = out.shape
    return (x.data_ptr(), out.data_ptr(), x.stride(0), tokens, width, DTYPE_CODES[x.dtype], threads())


def _route(ids: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor, renormalize: bool) -> tuple[float, ...]:
    tokens, experts = logits.shape
    return (
        logits.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        logits.stride(0),
        tokens,
        experts,
        ids.shape[1],
        int(renormalize),
        DTYPE_CODES[logits.dtype],
        threads(),
    )


def _sample(
    out: torch.Tensor,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed_lo: torch.Tensor,
    seed_hi: torch.Tensor,
    positions: torch.Tensor,
    mode: int,
) -> tuple[float, ...]:
    batch, vocab = logits.shape
    return (
        logits.data_ptr(),
        out.data_ptr(),
        temperature.data_ptr(),
        temperature.stride(0),
        top_k.data_ptr(),
        top_k.stride(0),
        top_p.data_ptr(),
        top_p.stride(0),
        min_p.data_ptr(),
        min_p.stride(0),
        seed_lo.data_ptr(),
        seed_lo.stride(0),
        seed_hi.data_ptr(),
        seed_hi.stride(0),
        positions.data_ptr(),
        positions.stride(0),
        logits.stride(0),
        batch,
        vocab,
        mode,
        DTYPE_CODES[logits.dtype],
        threads(),
    )


_RMS_NORM = kernel(
    "rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()", "minisgl_norm", "4P7qd", _rms_norm
)
_ADD_RMS_NORM = kernel(
    "add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()",
    "minisgl_norm",
    "4P7qd",
    _add_rms_norm,
)
_QK_NORM_ROPE_STORE = kernel(
    "qk_norm_rope_store(Tensor(a!) qkv, Tensor? q_weight, Tensor? k_weight, float eps, Tensor positions, "
    "Tensor cos_sin, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor out_loc) -> ()",
    "minisgl_rope",
    "8P12qd",
    _qk_norm_rope_store,
)
_ACT_AND_MUL = kernel("act_and_mul(Tensor(a!) out, Tensor x) -> ()", "minisgl_act", "2P5q", _act_and_mul)
_ROUTE_OP = kernel(
    "route(Tensor(a!) ids, Tensor(b!) weights, Tensor logits, bool renormalize) -> ()", "minisgl_route", "3P7q", _route
)
_SAMPLE_OP = kernel(
    "sample(Tensor(a!) out, Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor seed_lo, Tensor seed_hi, Tensor positions, int mode) -> ()",
    "minisgl_sample",
    "2P" + 7 * "Pq" + "6q",
    _sample,
)


class NativeOps:
    """Every operation, computed in float32. ``x``, ``residual`` and ``qkv`` are overwritten where the protocol allows
    it.
    """

    def __init__(self, setup: OpsSetup, options: object = None) -> None:
        library()
        self._all_reduce = setup.comm.all_reduce
        self._split = (setup.q_heads, setup.kv_heads, setup.kv_heads)
        self._heads = (setup.q_heads + 2 * setup.kv_heads, setup.head_dim)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x (T, N) -> new (T, N)."""
        out = x.new_empty(x.shape)
        _RMS_NORM(out, x, weight, eps)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual += x`` and ``x = rms_norm(residual)``, both in place; returns (x, residual)."""
        _ADD_RMS_NORM(x, residual, weight, eps)
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
        _QK_NORM_ROPE_STORE(qkv, q_weight, k_weight, eps, positions, cos_sin, k_cache, v_cache, out_loc)
        q, k, v = qkv.view(qkv.shape[0], *self._heads).split(self._split, dim=1)
        return q, k, v

    def act_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, 2I) -> new (T, I)."""
        out = x.new_empty((x.shape[0], x.shape[1] // 2))
        _ACT_AND_MUL(out, x)
        return out

    def route(self, logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Router logits (T, E) -> ids (T, k) int32, the lower expert first on a tie, weights (T, k) float32."""
        ids = logits.new_empty((logits.shape[0], top_k), dtype=torch.int32)
        weights = logits.new_empty((logits.shape[0], top_k), dtype=torch.float32)
        _ROUTE_OP(ids, weights, logits, renormalize)
        return ids, weights

    def sample(self, logits: torch.Tensor, args: SampleArgs, mode: SamplingMode) -> torch.Tensor:
        """Logits (B, V) -> ids (B,) int32; a row that holds a NaN gives -1."""
        out = logits.new_empty((logits.shape[0],), dtype=torch.int32)
        _SAMPLE_OP(out, logits, *args, _MODES[mode])
        return out

    def close(self) -> None:
        """Nothing to free."""
