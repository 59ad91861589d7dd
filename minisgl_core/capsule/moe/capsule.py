"""The contents of a capsule of routed experts.

Shapes: T tokens of a layer, B rows, k experts per token, E experts of the model, U experts that a layer used in this
step, I expert width, N hidden width. The width is one rank's. A layer may have
fewer tokens than the step: what comes after the last layer's attention needs but one token of each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch

from minisgl_core.plugin_api import Role
from minisgl_core.testing import reference
from minisgl_core.testing.device_fixture import dtype_named
from minisgl_core.testing.moe import TOLERANCE

from ..base import Capsule, Geometry, RecordedLayer
from ..difference import Difference, Place

__all__ = ["MoECapsule", "MoEGeometry", "MoELayer"]

_ACTIVATION: Final = "silu(gate) * up"


@dataclass(frozen=True, slots=True)
class MoEGeometry(Geometry):
    """The facts of ``MoESetup``."""

    num_experts: int
    """E"""
    top_k: int
    hidden_size: int
    intermediate_size: int
    """I"""
    max_tokens: int
    activation: str = _ACTIVATION
    """Role API 1 has no other activation"""


@dataclass(frozen=True, slots=True)
class MoELayer(RecordedLayer):
    """``out`` is (T, N): this rank's part, before ranks are summed and without the shared expert."""

    experts: tuple[int, ...]
    """(U,) the model's numbers of the recorded experts, ascending; the place in this tuple is its number here"""
    tokens: torch.Tensor
    """(T,) int32, ascending: which of the step's tokens these are"""
    x: torch.Tensor
    """(T, N)"""
    topk_ids: torch.Tensor
    """(T, k) int32, in the layer's own numbering; -1 = padding"""
    topk_weights: torch.Tensor
    """(T, k) float32"""
    size: torch.Tensor
    """(T,) float32: each token's results are judged as if they were of this size, at least; 0 in what was recorded"""
    w13: torch.Tensor
    """(U, 2I, N), gate rows first, as they were before the backend prepared them"""
    w2: torch.Tensor
    """(U, N, I)"""

    TENSORS: ClassVar = ("tokens", "x", "topk_ids", "topk_weights", "size", "out", "w13", "w2")

    def metadata(self) -> dict[str, Any]:
        return {"layer_id": self.layer_id, "experts": self.experts}

    @classmethod
    def of(cls, metadata: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> MoELayer:
        return cls(layer_id=metadata["layer_id"], experts=tuple(metadata["experts"]), **tensors)

    def original_ids(self) -> torch.Tensor:
        """(T, k) int32 in the model's numbering."""
        numbers = torch.tensor((*self.experts, -1), dtype=torch.int32)  # -1 finds the last
        return numbers[self.topk_ids.long()]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoECapsule(Capsule):
    """One step's routed experts, with the weights of just those that it used."""

    geometry: MoEGeometry
    layers: tuple[MoELayer, ...]

    ROLE: ClassVar[Role] = "moe"
    GEOMETRY: ClassVar = MoEGeometry
    LAYER: ClassVar = MoELayer

    def content(self) -> str:
        rows, g = len(self.uids), self.geometry
        tokens = f"{rows} row{'s' * (rows != 1)} ({self.real_tokens} new)"
        used = len({expert for layer in self.layers for expert in layer.experts})
        return f"{tokens}, top {g.top_k} of {g.num_experts} experts, {used} used"

    def real_tokens_of(self, place: int) -> int:
        """Number of real tokens of one layer; they come before padding."""
        return int((self.layers[place].tokens < self.real_tokens).sum())

    def expected(self, place: int) -> torch.Tensor:
        """(real tokens, N)"""
        layer, real = self.layers[place], self.real_tokens_of(place)
        ids, weights = layer.topk_ids[:real], layer.topk_weights[:real]
        return reference.experts(layer.x[:real], ids, weights, layer.w13, layer.w2)

    def slack(self, place: int, tolerance: float) -> torch.Tensor:
        layer, real = self.layers[place], self.real_tokens_of(place)
        ids, weights = layer.topk_ids[:real], layer.topk_weights[:real]
        return reference.experts_slack(layer.x[:real], ids, weights, layer.w13, layer.w2, tolerance)

    def locate(self, place: int, found: Difference) -> Place:
        layer, (token, column) = self.layers[place], found.where
        experts = tuple(expert for expert in layer.original_ids()[token].tolist() if expert >= 0)
        names = ", ".join(map(str, experts)) or "none"
        return Place(*self.row_of(int(layer.tokens[token])), f"column {column} of experts {names}", experts=experts)

    @classmethod
    def tolerance(cls, dtype: torch.dtype) -> float:
        return TOLERANCE[str(dtype).removeprefix("torch.")]

    @classmethod
    def usual_size(cls, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(T, 1) the root mean square of each token's result: a model's results vary in size, unlike the suite's."""
        finite = result.to(torch.float64).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return finite.square().mean(-1, keepdim=True).sqrt().clamp(min=torch.finfo(dtype).tiny)

    def scale(self, place: int, want: torch.Tensor) -> torch.Tensor:
        size = self.usual_size(want, dtype_named(self.geometry.dtype))
        return torch.maximum(size, self.layers[place].size[: len(want), None].to(torch.float64))

    def before_cuts(self) -> MoECapsule:
        """Fix the sizes of the whole results: parts of a sum may be much larger than the sum."""
        layers = []
        for place, layer in enumerate(self.layers):
            want = self.expected(place)
            size = layer.size.clone()
            size[: len(want)] = self.scale(place, want).flatten()
            layers.append(replace(layer, size=size))
        return replace(self, layers=tuple(layers))
