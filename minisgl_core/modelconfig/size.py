"""Counts the parameters of a model before any of them is allocated."""

from __future__ import annotations

from typing import Final

from .facts import ModelConfig, MoEConfig

__all__ = ["dequantised", "num_parameters"]

_MB: Final = 1_000_000
_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def dequantised(config: ModelConfig, dtype: str, num_bytes: int | None = None) -> str:
    """Describes how loading dequantises weights; empty for others. ``num_bytes``: the loaded size, if known."""
    if not config.quantised:
        return ""
    loaded = num_parameters(config) * _BYTES[dtype] if num_bytes is None else num_bytes
    stored = f" ({config.file_bytes / _MB:.0f} MB)" if config.file_bytes else ""
    return (
        f"the file's quantised weights{stored} are dequantised when they are loaded: {loaded / _MB:.0f} MB of {dtype}"
    )


def num_parameters(config: ModelConfig, tp_size: int = 1) -> int:
    """Number of weights and biases of the core's decoder on one of ``tp_size`` tensor-parallel ranks."""
    hidden, moe = config.hidden_size, config.moe
    sparse = 0 if moe is None else len(moe.layers)
    tables = 1 if config.tie_word_embeddings else 2
    return (
        tables * _part(config.vocab_size, tp_size) * hidden
        + config.num_layers * (_attention(config, tp_size) + 2 * hidden)
        + (0 if moe is None else sparse * _sparse_mlp(hidden, moe, tp_size))
        + (config.num_layers - sparse) * _dense_mlp(hidden, _part(config.intermediate_size, tp_size), config.mlp_bias)
        + hidden
    )


def _part(total: int, tp_size: int) -> int:
    """The share of one rank, padding included."""
    return -(-total // tp_size)


def _attention(config: ModelConfig, tp_size: int) -> int:
    hidden = config.hidden_size
    q = _part(config.num_q_heads, tp_size) * config.head_dim
    qkv = q + 2 * _part(config.num_kv_heads, tp_size) * config.head_dim
    norms = 2 * config.head_dim if config.qk_norm else 0
    return (hidden + config.qkv_bias) * qkv + (q + config.o_bias) * hidden + norms


def _dense_mlp(hidden: int, width: int, bias: bool = False) -> int:
    return 3 * hidden * width + (2 * width + hidden if bias else 0)


def _sparse_mlp(hidden: int, moe: MoEConfig, tp_size: int) -> int:
    """Router, routed experts, and the shared expert with its gate."""
    routed = moe.num_experts * (hidden + _dense_mlp(hidden, _part(moe.intermediate_size, tp_size)))
    shared = moe.shared_intermediate_size
    return routed + (_dense_mlp(hidden, _part(shared, tp_size)) + hidden if shared else 0)
