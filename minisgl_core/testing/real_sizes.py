"""Sizes of well-known models, so that claims are tried where they will be used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from minisgl_core.modelconfig.geometries import GEOMETRIES

__all__ = ["LARGEST_HIDDEN", "LARGEST_INTERMEDIATE", "LARGEST_VOCAB", "Heads", "real_heads"]

LARGEST_HIDDEN: Final = max(config.hidden_size for config in GEOMETRIES.values())
LARGEST_INTERMEDIATE: Final = max(config.intermediate_size for config in GEOMETRIES.values())
LARGEST_VOCAB: Final = max(config.vocab_size for config in GEOMETRIES.values())


class Heads(NamedTuple):
    """``name`` is the first model that has them."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def gqa_ratio(self) -> int:
        return self.q_heads // self.kv_heads


def real_heads() -> Iterator[Heads]:
    """Each combination once, including those with as many kv heads as query heads."""
    seen = set()
    for name, config in GEOMETRIES.items():
        shape = (config.num_q_heads, config.num_kv_heads, config.head_dim)
        if shape not in seen:
            seen.add(shape)
            yield Heads(name, *shape)
    yield Heads("llama2-7b", 32, 32, 128)
