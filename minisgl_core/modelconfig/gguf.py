"""A model's facts from GGUF metadata."""

from __future__ import annotations

import struct
from typing import Final

from ..errors import CheckpointError
from ..formats import GGUFFile
from .facts import ModelConfig, MoEConfig, RopeConfig
from .rope import DEFAULT_THETA

__all__ = ["GGUF_MODEL_TYPES", "read_gguf"]

GGUF_MODEL_TYPES: Final = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""GGUF architecture -> Hugging Face model_type and architecture."""

_FILE_TYPE_DTYPES: Final = {1: "float16", 32: "bfloat16"}
"""``general.file_type`` of files that are mostly float16 or bfloat16; quantised ones run in float32 by default."""
_F32: Final = 0


def read_gguf(file: GGUFFile) -> ModelConfig:
    """The model of a GGUF file.

    Raises :class:`~minisgl_core.errors.CheckpointError` for an architecture or a rope kind that is not supported.
    """
    arch = file.architecture
    if arch not in GGUF_MODEL_TYPES:
        raise _error(file, "general.architecture", arch, f"minisgl reads {', '.join(GGUF_MODEL_TYPES)}")
    model_type, architecture = GGUF_MODEL_TYPES[arch]
    if arch == "llama" and file.metadata.get("llama.expert_count"):
        raise _error(file, "llama.expert_count", file.metadata["llama.expert_count"], "Mixtral is not supported")
    heads, hidden = _integer(file, "attention.head_count"), _integer(file, "embedding_length")
    head_dim = _integer(file, "attention.key_length", hidden // heads)
    num_layers = _integer(file, "block_count")
    context = _integer(file, "context_length")
    window = _integer(file, "attention.sliding_window", 0) or None
    return ModelConfig(
        architecture="MistralForCausalLM" if arch == "llama" and window else architecture,
        model_type="mistral" if arch == "llama" and window else model_type,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        num_layers=num_layers,
        num_q_heads=heads,
        num_kv_heads=_integer(file, "attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=_integer(file, "feed_forward_length", 0),
        rms_norm_eps=round(float(file.require(f"{arch}.attention.layer_norm_rms_epsilon")), 12),
        rope=_rope(file, head_dim, context),
        max_position_embeddings=context,
        tie_word_embeddings="output.weight" not in file.tensors,
        dtype=_FILE_TYPE_DTYPES.get(file.metadata.get("general.file_type", _F32), "float32"),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        windows=(window,) * num_layers,
        moe=_moe(file, num_layers) if arch == "qwen3moe" else None,
        eos_token_ids=_eos(file),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _error(file: GGUFFile, key: str, value: object, remedy: str) -> CheckpointError:
    return CheckpointError(
        f"GGUF file {str(file.path)!r} has `{key}` = {value!r}", field=key, value=value, remedy=remedy
    )


def _integer(file: GGUFFile, suffix: str, default: int | None = None) -> int:
    key = f"{file.architecture}.{suffix}"
    value = file.metadata.get(key, default)
    if value is None:
        value = file.require(key)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, int):
        raise _error(file, key, value, "minisgl needs one number for all layers")
    return value


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding: what the model computes with, padding included."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise _error(file, "token_embd.weight", None, "the file holds no embedding: it is not a whole model")
    return embedding.shape[0]


def _rope(file: GGUFFile, head_dim: int, context: int) -> RopeConfig:
    arch = file.architecture
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise _error(file, f"{arch}.rope.scaling.type", kind, "minisgl reads none, linear and yarn from GGUF")
    attention_factor = file.metadata.get(f"{arch}.rope.scaling.attn_factor", 1.0)
    if attention_factor != 1.0:
        raise _error(file, f"{arch}.rope.scaling.attn_factor", attention_factor, "minisgl supports 1.0")
    scaled = kind != "none"
    return RopeConfig(
        theta=float(file.metadata.get(f"{arch}.rope.freq_base", DEFAULT_THETA)),
        rotary_dim=_integer(file, "rope.dimension_count", head_dim),
        kind=kind if scaled else "default",
        factor=float(file.require(f"{arch}.rope.scaling.factor")) if scaled else 1.0,
        original_max_position=_integer(file, "rope.scaling.original_context_length", context),
        divisors=_divisors(file),
    )


def _divisors(file: GGUFFile) -> tuple[float, ...]:
    """llama3 scaling reaches GGUF as one divisor per frequency, in a tensor of its own."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return ()
    if tensor.type_id != _F32 or len(tensor.shape) != 1:
        raise _error(file, "rope_freqs.weight", tensor, "it must be a float32 vector")
    with file.path.open("rb") as content:
        content.seek(tensor.start)
        return struct.unpack(f"<{tensor.shape[0]}f", content.read(4 * tensor.shape[0]))


def _moe(file: GGUFFile, num_layers: int) -> MoEConfig:
    layers = tuple(layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors)
    return MoEConfig(
        num_experts=_integer(file, "expert_count"),
        top_k=_integer(file, "expert_used_count"),
        intermediate_size=_integer(file, "expert_feed_forward_length"),
        norm_topk_prob=True,  # the format has no such key: readers of this architecture renormalise
        layers=layers,
    )


def _eos(file: GGUFFile) -> tuple[int, ...]:
    """End of sequence, and end of turn where the file names one apart."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(int(file.metadata[key]) for key in keys if key in file.metadata))
