"""The layer operations in float64, from their definitions in ``plugin_api.ops``. Shapes as there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from minisgl_core.plugin_api import SampleArgs

__all__ = ["gumbel", "kept_tokens", "rms_norm", "rope", "sample_scores", "silu_mul"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    wide = x.to(torch.float64)
    mean = (wide * wide).sum(-1, keepdim=True) / wide.shape[-1]
    return wide / (mean + eps).sqrt() * weight.to(torch.float64)


def rope(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding: pairs (i, i + R/2) of the first R dimensions of x (T, heads, D) are rotated; the others are
    kept.
    """
    out = x.to(torch.float64).clone()
    half = cos_sin.shape[1] // 2
    for token, position in enumerate(positions.tolist()):
        cos, sin = cos_sin[position, :half].to(torch.float64), cos_sin[position, half:].to(torch.float64)
        first, second = x[token, :, :half].to(torch.float64), x[token, :, half : 2 * half].to(torch.float64)
        out[token, :, :half] = first * cos - second * sin
        out[token, :, half : 2 * half] = first * sin + second * cos
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :I]) * x[:, I:]"""
    width = x.shape[1] // 2
    gate, up = x[:, :width].to(torch.float64), x[:, width:].to(torch.float64)
    return gate / (1 + torch.exp(-gate)) * up


def _mix(h: np.ndarray) -> np.ndarray:
    """The 32-bit finaliser of MurmurHash3 (Appleby, public domain)."""
    h = h ^ (h >> np.uint32(16))
    h = h * np.uint32(0x85EBCA6B)
    h = h ^ (h >> np.uint32(13))
    h = h * np.uint32(0xC2B2AE35)
    mixed: np.ndarray = h ^ (h >> np.uint32(16))
    return mixed


def gumbel(seed_lo: np.ndarray, seed_hi: np.ndarray, positions: np.ndarray, vocab: int) -> np.ndarray:
    """The core's noise, (B, V) float64. Each argument is (B,) int32; the arithmetic is modulo 2**32."""
    low, high, where = (np.asarray(a).astype(np.int64).astype(np.uint32) for a in (seed_lo, seed_hi, positions))
    key = _mix(low ^ _mix(high + np.uint32(0x9E3779B9)))
    key = _mix(key ^ _mix(where + np.uint32(0x7F4A7C15)))[:, None]
    token = np.arange(vocab, dtype=np.uint32) * np.uint32(0x9E3779B1)
    h = _mix(_mix(token[None, :] ^ key) + key)
    u = np.minimum((h.astype(np.float64) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    noise: np.ndarray = -np.log(-np.log1p(-u))
    return noise


def kept_tokens(probs: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Mask (V,) of the tokens of one row that remain after top-k (ties with the k-th are kept), then
    top-p, then min-p.
    """
    order = np.argsort(-probs, kind="stable")
    ordered = probs[order]
    k = len(probs) if top_k <= 0 else min(top_k, len(probs))
    left = ordered >= ordered[k - 1]
    total, before = float(ordered[left].sum()), 0.0
    keep = np.zeros(len(probs), dtype=bool)
    for place, (token, p) in enumerate(zip(order, ordered, strict=True)):
        inside_p = before < top_p * total or place == 0
        keep[token] = left[place] and inside_p and p >= min_p * ordered[0]
        before += float(p)
    return keep


def sample_scores(logits: torch.Tensor, args: SampleArgs, *, filtered: bool, slack: float = 0.0) -> np.ndarray:
    """The scores (B, V) float64 of which the sampled token must be an argmax. ``slack`` is added to every top-p, to
    find tokens at its edge.
    """
    rows = logits.to(torch.float64).cpu().numpy()
    values = {name: getattr(args, name).cpu().numpy() for name in args._fields}
    noise = gumbel(values["seed_lo"], values["seed_hi"], values["positions"], rows.shape[1])
    scores = np.empty_like(rows)
    for row, own in enumerate(rows):
        temperature = float(values["temperature"][row])
        if not temperature > 0:
            scores[row] = own
            continue
        scaled = (own - own.max()) / temperature
        scores[row] = scaled + noise[row]
        if filtered:
            probs = np.exp(scaled) / np.exp(scaled).sum()
            top_p = float(values["top_p"][row])
            top_p = top_p + slack if top_p < 1.0 else top_p
            keep = kept_tokens(probs, int(values["top_k"][row]), top_p, float(values["min_p"][row]))
            scores[row][~keep] = -np.inf
    return scores
