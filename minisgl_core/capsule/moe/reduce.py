"""Reduces a capsule of experts: tokens, choices, experts, and the sizes of the matrices."""

from __future__ import annotations

from collections.abc import Callable

from ..search import Fails, fewer, subset
from .capsule import MoECapsule
from .cuts import (
    renumbered,
    used_experts,
    with_choices,
    with_experts,
    with_hidden,
    with_num_experts,
    with_tokens,
    with_width,
)

__all__ = ["reduce_moe"]


def reduce_moe(capsule: MoECapsule, fails: Fails[MoECapsule]) -> MoECapsule:
    """Remove tokens and padding, then experts of each token and of the model, then columns of the matrices."""

    def judged(item: MoECapsule) -> bool:
        return bool(item.layers) and fails(item)

    capsule = subset(capsule, sum(capsule.q_lens), with_tokens, judged)
    capsule = subset(capsule, capsule.geometry.top_k, with_choices, fails)
    capsule = subset(capsule, len(used_experts(capsule)), with_experts, fails)
    capsule = _smaller_model(capsule, fails)
    capsule = _narrower(capsule, capsule.geometry.intermediate_size, with_width, fails)
    return _narrower(capsule, capsule.geometry.hidden_size, with_hidden, fails)


def _smaller_model(capsule: MoECapsule, fails: Fails[MoECapsule]) -> MoECapsule:
    """Only the used experts, with new numbers; if the failure needs their numbers, fewer unused ones after them."""
    dense = renumbered(capsule)
    if dense.geometry.num_experts < capsule.geometry.num_experts and fails(dense):
        return dense
    return fewer(capsule, _unused_behind, _less_experts, fails)


def _unused_behind(capsule: MoECapsule) -> int:
    least = max(capsule.geometry.top_k, *(expert + 1 for expert in (*used_experts(capsule), 0)))
    return capsule.geometry.num_experts - least


def _less_experts(capsule: MoECapsule, count: int) -> MoECapsule:
    return with_num_experts(capsule, capsule.geometry.num_experts - count)


def _narrower(
    capsule: MoECapsule, size: int, resized: Callable[[MoECapsule, int], MoECapsule], fails: Fails[MoECapsule]
) -> MoECapsule:
    """The smallest power of two below ``size``: kernels seldom have others."""
    smaller = (resized(capsule, 1 << power) for power in range((size - 1).bit_length()))
    return next(filter(fails, smaller), capsule)
