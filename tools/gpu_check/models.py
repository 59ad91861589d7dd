"""The models of the checks: random weights written by transformers, as the tests make them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from .checks import Here

__all__ = ["FORCED_MODELS", "forced_model", "real_geometry", "tests_checkpoints", "tiny_checkpoint"]

_QWEN3: Final[Mapping[str, Any]] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
FORCED_MODELS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "dense": (
        "qwen3",
        {"hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, **_QWEN3},
    ),
    "widths": (  # of Qwen3-0.6B, whose products have tiles and neighbours measured
        "qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            **_QWEN3,
        },
    ),
    "ratio5": (
        "llama",
        {"hidden_size": 640, "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 64, **_QWEN3},
    ),
    "moe": (
        "qwen3_moe",
        {
            "hidden_size": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_experts": 24,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
            **_QWEN3,
        },
    ),
}
"""Of the comparisons in bfloat16: head_dims that every attention library has prebuilt."""

GROUP_SCALE: Final = 40.0
"""Length of what the embeddings of a group have in common; the random rest has 8."""


@cache
def tests_checkpoints() -> ModuleType:
    """``support.make_checkpoints`` of the checkout's tests."""
    return importlib.import_module("support.make_checkpoints")


def tiny_checkpoint(name: str) -> Path:
    """The folder of one of the tests' checkpoints, made on first use."""
    folder: Path = tests_checkpoints().ensure_checkpoint(name)
    return folder


def forced_model(here: Here, name: str) -> Path:
    """One of :data:`FORCED_MODELS`, in bfloat16."""
    model_type, config = FORCED_MODELS[name]
    common = {
        "intermediate_size": 2 * config["hidden_size"],
        "num_hidden_layers": 2 if here.tiny else 4,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
    return _saved(here, f"model-{name}", model_type, {**common, **config}, "bfloat16")


def real_geometry(here: Here) -> Path:
    """Layers of Qwen3-0.6B's widths, and on a GPU its vocabulary, in float32."""
    config = {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "num_hidden_layers": 1 if here.tiny else 4,
        "vocab_size": 1024 if here.tiny else 151936,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        **_QWEN3,
    }
    return _saved(here, "model-real", "qwen3", config, "float32")


def _saved(here: Here, name: str, model_type: str, config: Mapping[str, Any], dtype: str) -> Path:
    def make(folder: Path) -> None:
        import torch

        tools = tests_checkpoints()
        _quiet()
        ends = {"eos_token_id": None, "bos_token_id": None}
        model = tools.build_model(tools.Recipe(model_type, {**config, **ends}, seed=1))
        if "num_experts" in config:
            _make_routing_clear(model)
        model.to(getattr(torch, dtype)).save_pretrained(folder)

    return here.once(name, make)


def _make_routing_clear(model: Any) -> None:
    """Tokens in groups, and for each group ``top_k`` experts that its tokens always prefer.

    A random router has near ties in every long prompt; rounding then exchanges experts, and logits are off by more than
    any bound that would still catch a fault.
    """
    import torch

    config = model.config
    groups = config.num_experts // config.num_experts_per_tok
    directions = torch.randn(groups, config.hidden_size, generator=torch.Generator().manual_seed(0))
    directions = torch.nn.functional.normalize(directions, dim=1)
    scales = {"mlp.gate.weight": 1.0, "embed_tokens.weight": GROUP_SCALE}
    for name, parameter in model.named_parameters():
        scale = next((scale for end, scale in scales.items() if name.endswith(end)), None)
        if scale is not None:
            parameter.data += scale * directions[torch.arange(parameter.shape[0]) % groups]


def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
