"""The core's Gumbel noise as a pure function of (seed, position, token id)."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gumbel", "row_key"]


@triton.jit
def _fmix(h):
    h = h ^ (h >> 16)
    h = h * tl.full([], 0x85EBCA6B, tl.uint32)
    h = h ^ (h >> 13)
    h = h * tl.full([], 0xC2B2AE35, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def row_key(seed_lo, seed_hi, position):
    """int32 each -> uint32"""
    low = seed_lo.to(tl.uint32, bitcast=True)
    high = seed_hi.to(tl.uint32, bitcast=True)
    where = position.to(tl.uint32, bitcast=True)
    key = _fmix(low ^ _fmix(high + tl.full([], 0x9E3779B9, tl.uint32)))
    return _fmix(key ^ _fmix(where + tl.full([], 0x7F4A7C15, tl.uint32)))


@triton.jit
def gumbel(key, token):
    """Of int32 token ids, float32."""
    h = _fmix((token.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32)) ^ key)
    h = _fmix(h + key)
    u = tl.minimum((h.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    # -log1p(-u) to full relative precision where u is small, which is the end that decides.
    small = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * 0.2))))
    exact = -tl.log(1.0 - u)
    return -tl.log(tl.where(u < 0.01, small, exact))
