"""The content of a good config.json of each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["LLAMA", "MISTRAL", "QWEN2", "QWEN2_MOE", "QWEN3", "QWEN3_MOE", "family", "without", "write_tiny_config"]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "rope_theta": 10000.0,
}


def family(model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    return {**LLAMA, "model_type": model_type, "architectures": [architecture], **more}


QWEN2 = family("qwen2", "Qwen2ForCausalLM")
QWEN3 = family("qwen3", "Qwen3ForCausalLM")
MISTRAL = family("mistral", "MistralForCausalLM")
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
QWEN3_MOE = family("qwen3_moe", "Qwen3MoeForCausalLM", **EXPERTS)
QWEN2_MOE = family("qwen2_moe", "Qwen2MoeForCausalLM", **EXPERTS)


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


def write_tiny_config(folder: Path, **changes: Any) -> Path:
    """``folder`` with the config.json of a Qwen3 of two layers and 32 channels, changed; its weights are drawn."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder
