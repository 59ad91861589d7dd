"""Softmax, top-k and renormalisation, one program per token. Shapes: T tokens, E experts, k experts per token."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..kernels import DEVICES, library
from ..launch import Form, Kernel, power_of_two

__all__ = ["route"]


@triton.jit
def _route_kernel(
    ids_ptr,
    weights_ptr,
    logits_ptr,
    stride,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    LANES: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Top-k by 64-bit keys.

    Each logit and its expert become one key, greater for a greater logit, then for a lower expert. No two keys are
    equal, so each maximum is one expert, and a NaN (the greatest) still names one.
    """
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    inside = lanes < EXPERTS
    logits = tl.load(logits_ptr + token * stride + lanes, mask=inside, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == 0.0, 0.0, logits)  # of the two zeros, neither is greater
    highest = tl.max(logits, axis=0)
    total = tl.sum(tl.exp(logits - highest), axis=0)
    bits = logits.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (ordered.to(tl.int64) << 32) | (LANES - 1 - lanes).to(tl.int64)
    least = tl.full((LANES,), -0x8000000000000000, tl.int64)
    keys = tl.where(inside, keys, least)
    choices = tl.arange(0, CHOICES)
    ids = tl.zeros((CHOICES,), tl.int32)
    weights = tl.zeros((CHOICES,), tl.float32)
    for choice in range(TOP_K):
        best = tl.max(keys, axis=0)
        chosen = choices == choice
        ids = tl.where(chosen, LANES - 1 - (best & 0x7FFFFFFF).to(tl.int32), ids)
        high = (best >> 32).to(tl.int32)
        logit = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
        weights = tl.where(chosen, tl.exp(logit - highest) / total, weights)
        keys = tl.where(keys == best, least, keys)
    if RENORMALIZE:
        weights /= tl.sum(weights, axis=0)
    at = token * TOP_K + choices
    tl.store(ids_ptr + at, ids, mask=choices < TOP_K)
    tl.store(weights_ptr + at, weights, mask=choices < TOP_K)


_KERNEL = Kernel(_route_kernel)


@lru_cache(maxsize=64)
def _form(experts: int, top_k: int, renormalize: bool) -> Form:
    lanes = power_of_two(experts)
    constants = (experts, top_k, int(renormalize), lanes, power_of_two(top_k))
    return _KERNEL.form(constants, warps=max(1, min(8, lanes // 256)))


def _route(ids: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor, renormalize: bool) -> None:
    (tokens, top_k), experts = ids.shape, logits.shape[1]
    if tokens:
        _form(experts, top_k, renormalize).launch((tokens, 1), (ids, weights, logits), (), logits.stride(0))


route = library.register(
    "route(Tensor(a!) ids, Tensor(b!) weights, Tensor logits, bool renormalize) -> ()", _route, DEVICES
)
"""logits (T, E) -> ids (T, k) int32 and weights (T, k) float32"""
