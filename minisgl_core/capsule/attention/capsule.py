"""The contents of a capsule of attention.

Shapes: T tokens of the step, B rows, P the most pages of a row, N pages of the capsule (the dummy page is one more, at
index N), S page_size, H query heads, K kv heads, D head_dim. Heads are one rank's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch

from minisgl_core.plugin_api import LayerFacts, Role
from minisgl_core.testing import TOLERANCE, reference

from ..base import Capsule, Geometry, RecordedLayer
from ..difference import Difference, Place

__all__ = ["AttentionCapsule", "AttentionGeometry", "AttentionLayer"]


@dataclass(frozen=True, slots=True)
class AttentionGeometry(Geometry):
    """The facts of ``AttentionSetup``. ``page_size`` is the pool's."""

    kv_dtype: str
    kv_layout: str
    page_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_batch: int
    max_tokens: int
    max_seq_len: int
    batches_in_flight: int = 2


@dataclass(frozen=True, slots=True)
class AttentionLayer(RecordedLayer):
    """``out`` is (T, H, D)."""

    facts: LayerFacts
    q: torch.Tensor
    """(T, H, D)"""
    k: torch.Tensor
    """(T, K, D)"""
    v: torch.Tensor
    """(T, K, D)"""
    k_pages: torch.Tensor
    """(N + 1, S, K, D): the pages of this step's rows as they were before the call, and the dummy page"""
    v_pages: torch.Tensor
    """(N + 1, S, K, D)"""

    TENSORS: ClassVar = ("q", "k", "v", "out", "k_pages", "v_pages")

    def metadata(self) -> dict[str, Any]:
        return {"layer_id": self.layer_id, **asdict(self.facts)}

    @classmethod
    def of(cls, metadata: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> AttentionLayer:
        facts = LayerFacts(**{name: metadata[name] for name in ("scale", "window", "softcap")})
        return cls(layer_id=metadata["layer_id"], facts=facts, **tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCapsule(Capsule):
    """One step's attention, with the KV pages of its rows, renumbered."""

    geometry: AttentionGeometry
    layers: tuple[AttentionLayer, ...]
    kv_lens: tuple[int, ...]
    """(B,) tokens with KV, this pass's included"""
    page_ids: torch.Tensor
    """(B, P) int32, in the capsule's own numbering; entries past the live length are N"""
    positions: torch.Tensor
    """(T,) int32"""
    out_loc: torch.Tensor
    """(T,) int32 slots, in the capsule's own numbering"""

    ROLE: ClassVar[Role] = "attention"
    GEOMETRY: ClassVar = AttentionGeometry
    LAYER: ClassVar = AttentionLayer
    FACTS: ClassVar = (*Capsule.FACTS, "kv_lens")
    TENSORS: ClassVar = ("page_ids", "positions", "out_loc")

    @property
    def num_pages(self) -> int:
        """N"""
        return self.layers[0].k_pages.shape[0] - 1

    def content(self) -> str:
        real = len(self.uids)
        lens = ", ".join(map(str, self.kv_lens[: min(real, 6)])) + (", ..." if real > 6 else "")
        return f"{real} row{'s' * (real != 1)} of {lens} tokens ({self.real_tokens} new)"

    def expected_row(self, layer: AttentionLayer, row: int) -> torch.Tensor:
        """float64 (new tokens, H, D) of one row, from its pages."""
        size, total = self.geometry.page_size, self.kv_lens[row]
        pages = self.page_ids[row, : -(-total // size)].long()
        k, v = (cache[pages].flatten(0, 1)[:total] for cache in (layer.k_pages, layer.v_pages))
        start = sum(self.q_lens[:row])
        return reference.attention(layer.q[start : start + self.q_lens[row]], k, v, layer.facts)

    def expected(self, place: int) -> torch.Tensor:
        layer = self.layers[place]
        return torch.cat([self.expected_row(layer, row) for row in range(len(self.uids))])

    def slack(self, place: int, tolerance: float) -> torch.Tensor:
        """The tolerance applies to one product, attention weights times values."""
        layer = self.layers[place]
        sizes = replace(layer, v_pages=layer.v_pages.abs())
        return tolerance * torch.cat([self.expected_row(sizes, row) for row in range(len(self.uids))])

    def locate(self, place: int, found: Difference) -> Place:
        token, head, _ = found.where
        return Place(*self.row_of(token), f"head {head}", head=head)

    @classmethod
    def tolerance(cls, dtype: torch.dtype) -> float:
        return TOLERANCE[str(dtype).removeprefix("torch.")]
