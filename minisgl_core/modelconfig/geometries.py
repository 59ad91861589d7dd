"""Well-known model shapes by name: configs without weights, for ``explain`` and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from minisgl_core.errors import UsageError, nearest

from .facts import ModelConfig, MoEConfig, RopeConfig

__all__ = ["GEOMETRIES", "geometry"]


def _qwen3(layers: int, hidden: int, intermediate: int, q_heads: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=hidden,
        num_layers=layers,
        num_q_heads=q_heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=intermediate,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6, rotary_dim=128),
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
        dtype="bfloat16",
        qk_norm=True,
        windows=(None,) * layers,
        eos_token_ids=(151645, 151643),
    )


_TINY: Final = ModelConfig(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6, rotary_dim=32),
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    dtype="float32",
    qk_norm=True,
    windows=(None, None),
)

_LLAMA3_8B: Final = ModelConfig(
    architecture="LlamaForCausalLM",
    model_type="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=5e5, rotary_dim=128),
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    dtype="bfloat16",
    windows=(None,) * 32,
    eos_token_ids=(128001, 128009),
    bos_token_id=128000,
)

GEOMETRIES: Final[Mapping[str, ModelConfig]] = MappingProxyType(
    {
        "qwen3-0.6b": _qwen3(layers=28, hidden=1024, intermediate=3072, q_heads=16, tied=True),
        "qwen3-4b": _qwen3(layers=36, hidden=2560, intermediate=9728, q_heads=32, tied=True),
        "qwen3-14b": _qwen3(layers=40, hidden=5120, intermediate=17408, q_heads=40, tied=False),
        "qwen3-30b-a3b": ModelConfig(
            architecture="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            vocab_size=151936,
            hidden_size=2048,
            num_layers=48,
            num_q_heads=32,
            num_kv_heads=4,
            head_dim=128,
            intermediate_size=6144,
            rms_norm_eps=1e-6,
            rope=RopeConfig(theta=1e6, rotary_dim=128),
            max_position_embeddings=40960,
            tie_word_embeddings=False,
            dtype="bfloat16",
            qk_norm=True,
            windows=(None,) * 48,
            moe=MoEConfig(
                num_experts=128, top_k=8, intermediate_size=768, norm_topk_prob=True, layers=tuple(range(48))
            ),
            eos_token_ids=(151645, 151643),
        ),
        "tiny": _TINY,
        "tiny-moe": replace(
            _TINY,
            architecture="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            moe=MoEConfig(num_experts=8, top_k=2, intermediate_size=64, norm_topk_prob=True, layers=(0, 1)),
        ),
        "llama3-8b": _LLAMA3_8B,
        "llama-3.1-8b": replace(
            _LLAMA3_8B,
            rope=RopeConfig(theta=5e5, rotary_dim=128, kind="llama3", factor=8.0, original_max_position=8192),
            max_position_embeddings=131072,
            eos_token_ids=(128001, 128008, 128009),
        ),
        "qwen2.5-7b": ModelConfig(
            architecture="Qwen2ForCausalLM",
            model_type="qwen2",
            vocab_size=152064,
            hidden_size=3584,
            num_layers=28,
            num_q_heads=28,
            num_kv_heads=4,
            head_dim=128,
            intermediate_size=18944,
            rms_norm_eps=1e-6,
            rope=RopeConfig(theta=1e6, rotary_dim=128),
            max_position_embeddings=32768,
            tie_word_embeddings=False,
            dtype="bfloat16",
            qkv_bias=True,
            windows=(None,) * 28,
            eos_token_ids=(151645, 151643),
        ),
        "smollm2-135m": ModelConfig(
            architecture="LlamaForCausalLM",
            model_type="llama",
            vocab_size=49152,
            hidden_size=576,
            num_layers=30,
            num_q_heads=9,
            num_kv_heads=3,
            head_dim=64,
            intermediate_size=1536,
            rms_norm_eps=1e-5,
            rope=RopeConfig(theta=1e5, rotary_dim=64),
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            dtype="bfloat16",
            windows=(None,) * 30,
            eos_token_ids=(2,),
            bos_token_id=1,
        ),
    }
)


def geometry(name: str) -> ModelConfig:
    """The geometry with this name. Raises :class:`UsageError` that names the nearest one for an unknown name."""
    if name not in GEOMETRIES:
        raise UsageError(
            f"unknown geometry {name!r}",
            field="geometry",
            value=name,
            remedy=nearest(name, GEOMETRIES) or f"known are {', '.join(GEOMETRIES)}",
        )
    return GEOMETRIES[name]
