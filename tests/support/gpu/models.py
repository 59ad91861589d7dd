"""The models of the checks: random weights written by transformers, as the tests make them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..make_checkpoints import Recipe, build_model
from .check import Context

__all__ = ["FORCED_MODELS", "forced_model", "real_geometry"]


def _sizes(hidden: int, q_heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        **more,
    }


_EXPERTS: Final = {"num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
FORCED_MODELS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "dense": ("qwen3", _sizes(512, 16, 8, 128)),
    # those of Qwen3-0.6B, whose products have measured tiles and fused epilogues
    "widths": ("qwen3", _sizes(1024, 16, 8, 128, intermediate_size=3072)),
    "ratio5": ("llama", _sizes(640, 10, 2, 64)),
    "moe": ("qwen3_moe", _sizes(256, 8, 2, 64, **_EXPERTS)),
}
"""The models that are compared in bfloat16, with head_dims that every attention library has prebuilt"""
GROUP_SCALE: Final = 40.0
"""Length of what the embeddings of a group have in common; the random rest has 8."""


def forced_model(context: Context, name: str) -> Path:
    """One of :data:`FORCED_MODELS`, in bfloat16."""
    model_type, config = FORCED_MODELS[name]
    common = {
        "intermediate_size": 2 * config["hidden_size"],
        "num_hidden_layers": 2 if context.tiny else 4,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
    return _saved(context, f"model-{name}", model_type, {**common, **config}, "bfloat16")


def real_geometry(context: Context) -> Path:
    """Layers of Qwen3-0.6B's widths, and on a GPU its vocabulary, in float32."""
    more = {
        "intermediate_size": 3072,
        "num_hidden_layers": 1 if context.tiny else 4,
        "vocab_size": 1024 if context.tiny else 151936,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    return _saved(context, "model-real", "qwen3", _sizes(1024, 16, 8, 128, **more), "float32")


def _saved(context: Context, name: str, model_type: str, config: Mapping[str, Any], dtype: str) -> Path:
    def make(folder: Path) -> None:
        import torch

        _quiet()
        ends = {"eos_token_id": None, "bos_token_id": None}
        model = build_model(Recipe(model_type, {**config, **ends}, seed=1))
        if "num_experts" in config:
            _make_routing_clear(model)
        model.to(getattr(torch, dtype)).save_pretrained(folder)

    return context.once(name, make)


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
