"""The core's Gumbel noise as a pure function of (seed, position, token id)."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gumbel", "gumbel_bound", "row_key"]

_LOG_2: tl.constexpr = tl.constexpr(0.6931471805599453)
_EXPONENT: tl.constexpr = tl.constexpr(127 + 32)
"""Offsets of the bits of a float to its binary logarithm, and of u in units of 2**-32 to that of u."""
_ROUNDING: tl.constexpr = tl.constexpr(1e-3)
"""Much more than all rounding in the two functions."""


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
def _uniform(key, token):
    """u * 2**32, float32"""
    h = _fmix((token.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32)) ^ key)
    return _fmix(h + key).to(tl.float32) + 0.5


@triton.jit
def gumbel(key, token):
    """Of int32 token ids, float32."""
    u = tl.minimum(_uniform(key, token) * 2.3283064365386963e-10, 0.99999994039535522)
    # -log1p(-u) to full relative precision where u is small, which is the end that decides.
    small = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * 0.2))))
    exact = -tl.log(1.0 - u)
    return -tl.log(tl.where(u < 0.01, small, exact))


@triton.jit
def gumbel_bound(key, token):
    """An upper bound of ``gumbel``, at most 0.07 above it where that exceeds 4, for a third of its work and without a
    logarithm.

    -log(-log(1 - u)) <= -log(u), and the bits of a positive float, read as a number, never exceed its binary logarithm
    once scaled and shifted: they represent 1 + m where the logarithm is log2(1 + m), in the same power of two.
    """
    bits = _uniform(key, token).to(tl.int32, bitcast=True).to(tl.float32)
    return bits * (-_LOG_2 / 8388608.0) + (_EXPONENT * _LOG_2 + _ROUNDING)
