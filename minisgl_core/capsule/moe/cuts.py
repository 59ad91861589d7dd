"""Cuts: smaller capsules of experts made from larger ones.

Every cut leaves a consistent capsule: recorded results that it makes meaningless are replaced by the reference's.
Shapes as in :mod:`.capsule`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from .capsule import MoECapsule, MoELayer

__all__ = [
    "renumbered",
    "used_experts",
    "with_choices",
    "with_experts",
    "with_hidden",
    "with_num_experts",
    "with_tokens",
    "with_width",
]


def used_experts(capsule: MoECapsule) -> list[int]:
    """The experts that any layer uses, by the model's numbers, ascending."""
    return sorted({expert for layer in capsule.layers for expert in layer.experts})


def with_tokens(capsule: MoECapsule, tokens: Sequence[int]) -> MoECapsule:
    """Keep only these of the step's tokens, ascending. Rows without tokens and layers with only padding are dropped."""
    kept = torch.tensor(tokens, dtype=torch.int32)
    ends = torch.tensor(capsule.q_lens, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    counts = torch.bincount(torch.searchsorted(ends, kept, right=True), minlength=len(capsule.q_lens)).tolist()
    smaller = replace(
        capsule,
        q_lens=tuple(count for count in counts if count),
        uids=tuple(uid for uid, count in zip(capsule.uids, counts, strict=False) if count),
        layers=tuple(_used_only(_take_tokens(layer, kept)) for layer in capsule.layers),
    )
    return smaller.with_layers([place for place in range(len(smaller.layers)) if smaller.real_tokens_of(place)])


def with_choices(capsule: MoECapsule, choices: Sequence[int]) -> MoECapsule:
    """Keep only these of each token's k experts, by place."""

    def cut(layer: MoELayer) -> MoELayer:
        ids, weights = layer.topk_ids[:, list(choices)], layer.topk_weights[:, list(choices)]
        return _used_only(replace(layer, topk_ids=ids, topk_weights=weights))

    return _answered_anew(replace(capsule, geometry=replace(capsule.geometry, top_k=len(choices))), cut)


def with_experts(capsule: MoECapsule, kept: Sequence[int]) -> MoECapsule:
    """Keep only these experts, by place among those used; other choices of a token become padding."""
    used = used_experts(capsule)
    wanted = {used[place] for place in kept}

    def cut(layer: MoELayer) -> MoELayer:
        stays = torch.tensor([expert in wanted for expert in (*layer.experts, -1)])  # -1 finds the last
        return _used_only(replace(layer, topk_ids=layer.topk_ids.where(stays[layer.topk_ids.long()], -1)))

    return _answered_anew(capsule, cut)


def renumbered(capsule: MoECapsule) -> MoECapsule:
    """Shrink the model to the experts that are used, in their order, but to no fewer than a token chooses."""
    number = {expert: place for place, expert in enumerate(used_experts(capsule))}
    layers = tuple(replace(layer, experts=tuple(number[e] for e in layer.experts)) for layer in capsule.layers)
    return with_num_experts(replace(capsule, layers=layers), max(capsule.geometry.top_k, len(number)))


def with_num_experts(capsule: MoECapsule, count: int) -> MoECapsule:
    """Shrink the model to ``count`` experts, more than the largest number in use."""
    return replace(capsule, geometry=replace(capsule.geometry, num_experts=count))


def with_width(capsule: MoECapsule, width: int) -> MoECapsule:
    """Keep only the first ``width`` of each expert's I inner values."""
    full = capsule.geometry.intermediate_size

    def cut(layer: MoELayer) -> MoELayer:
        w13 = torch.cat((layer.w13[:, :width], layer.w13[:, full : full + width]), 1)
        return replace(layer, w13=w13, w2=layer.w2[:, :, :width])

    return _answered_anew(replace(capsule, geometry=replace(capsule.geometry, intermediate_size=width)), cut)


def with_hidden(capsule: MoECapsule, hidden: int) -> MoECapsule:
    """Keep only the first ``hidden`` of the N columns of inputs and results."""

    def cut(layer: MoELayer) -> MoELayer:
        x, out = layer.x[:, :hidden], layer.out[:, :hidden]
        return replace(layer, x=x, out=out, w13=layer.w13[:, :, :hidden], w2=layer.w2[:, :hidden])

    return _answered_anew(replace(capsule, geometry=replace(capsule.geometry, hidden_size=hidden)), cut)


def _take_tokens(layer: MoELayer, kept: torch.Tensor) -> MoELayer:
    """Keep the tokens of the layer that are among the kept ones of the step, renumbered."""
    here = torch.isin(layer.tokens, kept)
    return replace(
        layer,
        tokens=torch.searchsorted(kept, layer.tokens[here], out_int32=True),
        x=layer.x[here],
        out=layer.out[here],
        topk_ids=layer.topk_ids[here],
        topk_weights=layer.topk_weights[here],
        size=layer.size[here],
    )


def _used_only(layer: MoELayer) -> MoELayer:
    """Drop experts that no token has."""
    used = layer.topk_ids[layer.topk_ids >= 0].unique().long()
    numbers = torch.full((len(layer.experts) + 1,), -1, dtype=torch.int32)  # -1 finds the last
    numbers[used] = torch.arange(len(used), dtype=torch.int32)
    return replace(
        layer,
        experts=tuple(layer.experts[place] for place in used.tolist()),
        topk_ids=numbers[layer.topk_ids.long()],
        w13=layer.w13[used],
        w2=layer.w2[used],
    )


def _answered_anew(capsule: MoECapsule, cut: Callable[[MoELayer], MoELayer]) -> MoECapsule:
    """Cut every layer. The recorded results belong to other weights, so the reference's replace them."""
    cut_down = replace(capsule, layers=tuple(map(cut, capsule.layers)))
    layers = []
    for place, layer in enumerate(cut_down.layers):
        out = layer.out.clone()
        want = cut_down.expected(place)
        out[: len(want)] = want.to(out.dtype)
        layers.append(replace(layer, out=out))
    return replace(cut_down, layers=tuple(layers))
