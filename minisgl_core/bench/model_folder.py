"""Writes a folder with only the config.json of a known geometry, for engines with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minisgl_core.modelconfig import ModelConfig

__all__ = ["config_json", "write_geometry"]


def config_json(model: ModelConfig) -> dict[str, Any]:
    """The config.json that is parsed to this model; only default and llama3 rope."""
    content: dict[str, Any] = {
        "architectures": [model.architecture],
        "model_type": model.model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_q_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": model.tie_word_embeddings,
        "hidden_act": model.hidden_act,
        "torch_dtype": model.dtype,
        "eos_token_id": list(model.eos_token_ids),
    }
    if model.rope.kind == "llama3":
        content["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": model.rope.factor,
            "low_freq_factor": model.rope.low_freq_factor,
            "high_freq_factor": model.rope.high_freq_factor,
            "original_max_position_embeddings": model.rope.original_max_position,
        }
    if model.moe is not None:
        content |= {
            "num_experts": model.moe.num_experts,
            "num_experts_per_tok": model.moe.top_k,
            "moe_intermediate_size": model.moe.intermediate_size,
            "norm_topk_prob": model.moe.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i in range(model.num_layers) if i not in model.moe.layers],
        }
    return content


def write_geometry(model: ModelConfig, folder: Path) -> Path:
    """Write a model without weights to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(model), indent=1))
    return folder
