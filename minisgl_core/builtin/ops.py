"""Role ``ops``, composed of plain torch operations: the default of every operation, on every device.

It is also the definition that fused implementations are compared with. Shapes as in ``plugin_api.ops``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from minisgl_core.plugin_api import OpsSetup, RopeStoreArgs, SampleArgs, SamplingMode

__all__ = ["ComposedOps", "apply_rope", "filter_mask", "gumbel_noise"]

_MASK = 0xFFFFFFFF
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def _fmix(h: torch.Tensor) -> torch.Tensor:
    """The 32-bit finaliser of MurmurHash3 (Appleby, public domain), on int64 tensors that hold uint32 values."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _MASK
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def gumbel_noise(
    seed_lo: torch.Tensor, seed_hi: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Standard Gumbel noise (B, V) float32 as a pure function of (seed, position, token id).

    ``seed_lo``, ``seed_hi``, ``positions``: (B,) int32. All arithmetic is modulo 2**32.
    """
    low, high, where = (t.to(torch.int64) & _MASK for t in (seed_lo, seed_hi, positions))
    key = _fmix(low ^ _fmix((high + 0x9E3779B9) & _MASK))
    key = _fmix(key ^ _fmix((where + 0x7F4A7C15) & _MASK))[:, None]
    token = (torch.arange(vocab_size, device=positions.device, dtype=torch.int64) * 0x9E3779B1) & _MASK
    h = _fmix(token[None, :] ^ key)
    h = _fmix((h + key) & _MASK)
    # The small end of u decides who wins; float32 keeps full relative precision there. 1.0 itself would give -inf.
    u = ((h.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)
    return -torch.log(-torch.log1p(-u))


def filter_mask(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Which tokens survive top-k, then top-p of what is left, then min-p: (B, V) bool.

    Ties at the k-th probability all survive top-k; among equal probabilities top-p prefers the lower id.
    """
    vocab = probs.shape[-1]
    ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    k = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k).to(torch.int64)
    kth = ordered.gather(-1, (k - 1)[:, None])
    kept = torch.where(ordered >= kth, ordered, 0.0)
    before = kept.cumsum(-1) - kept
    keep = (ordered >= kth) & (before < top_p[:, None] * kept.sum(-1, keepdim=True))
    keep[:, 0] = True
    keep &= ordered >= min_p[:, None] * ordered[:, :1]
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first R dimensions of x (T, heads, D) by cos and sin (T, R/2) float32; half-split pairing."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat(((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest), dim=-1)


class ComposedOps:
    """Every layer operation in plain torch."""

    def __init__(self, setup: OpsSetup, options: Any = None) -> None:
        self._s = setup

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (scaled * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def allreduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.add_rms_norm(self._s.comm.all_reduce(x), residual, weight, eps)

    def qk_norm_rope_store(
        self, qkv: torch.Tensor, args: RopeStoreArgs, positions: torch.Tensor, out_loc: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        s = self._s
        heads = qkv.view(qkv.shape[0], s.q_heads + 2 * s.kv_heads, s.head_dim)
        q, k, v = heads.split((s.q_heads, s.kv_heads, s.kv_heads), dim=1)
        if args.q_weight is not None and args.k_weight is not None:
            q, k = self.rms_norm(q, args.q_weight, args.eps), self.rms_norm(k, args.k_weight, args.eps)
        cos, sin = args.cos_sin.index_select(0, positions).chunk(2, dim=-1)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        s.kv.store(args.k_cache, args.v_cache, k, v, out_loc)
        return q, k, v

    def act_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def route(self, logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = torch.softmax(logits.float(), dim=-1).topk(top_k, dim=-1)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids.to(torch.int32), weights

    def sample(self, logits: torch.Tensor, args: SampleArgs, mode: SamplingMode) -> torch.Tensor:
        """As the protocol says; a row whose maximum is NaN gives -1 instead of a token."""
        logits = logits.float()
        top, ids = logits.max(dim=-1)
        if mode != "greedy":
            warm = args.temperature > 0
            divisor = torch.where(warm, args.temperature, 1.0)[:, None]
            scaled = (logits - top[:, None]) / divisor
            scores = scaled + gumbel_noise(args.seed_lo, args.seed_hi, args.positions, logits.shape[-1])
            if mode == "filtered":
                keep = filter_mask(torch.softmax(scaled, dim=-1), args.top_k, args.top_p, args.min_p)
                scores = scores.masked_fill(~keep, -torch.inf)
            ids = torch.where(warm, scores.argmax(dim=-1), ids)
        return torch.where(top.isnan(), -1, ids).to(torch.int32)

    def close(self) -> None:
        """Nothing to free."""
