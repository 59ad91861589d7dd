"""The content of a good config.json of each family."""

from __future__ import annotations

from typing import Any

__all__ = ["LLAMA", "MISTRAL", "QWEN2", "QWEN2_MOE", "QWEN3", "QWEN3_MOE", "family", "without"]

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
