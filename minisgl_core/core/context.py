"""The Context of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..distributed import DistributedInfo
    from ..modelconfig import ModelConfig
    from ..plugin_api import Communicator, KVKernels, LayerOps, LinearBackend, MoEExecutor, Platform
    from ..plugin_api.batch import KVPool

__all__ = ["Context"]


@dataclass(slots=True)
class Context:
    """What a model's layers need from their engine: facts and the chosen backends, handed down at construction."""

    config: ModelConfig
    tp: DistributedInfo
    device: torch.device
    dtype: torch.dtype
    platform: Platform
    comm: Communicator
    kv: KVKernels
    ops: LayerOps
    linear: LinearBackend
    fused: frozenset[str] = frozenset()
    """Operations that products may fuse, where the linear backend finds it faster"""
    moe: MoEExecutor | None = None
    attn: Any = None
    """The attention dispatcher: ``forward(q, k, v, layer_id, batch)``."""
    pool: KVPool | None = None
    max_seq_len: int = 0
    max_tokens: int = 0
