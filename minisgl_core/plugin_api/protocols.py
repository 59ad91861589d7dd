"""The protocol of each role, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from . import (
    AttentionBackend,
    Communicator,
    GrammarBackend,
    GraphRunner,
    KVKernels,
    LayerOps,
    LinearBackend,
    MoEExecutor,
    Parser,
    Platform,
    Role,
)

__all__ = ["PROTOCOLS"]

PROTOCOLS: Final[Mapping[Role, type]] = {
    "attention": AttentionBackend,
    "graph": GraphRunner,
    "kv": KVKernels,
    "moe": MoEExecutor,
    "ops": LayerOps,
    "linear": LinearBackend,
    "comm": Communicator,
    "platform": Platform,
    "grammar": GrammarBackend,
    "parser": Parser,
}
"""Models have none: the engine constructs them."""
