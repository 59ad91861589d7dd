"""Reads the facts of a model from GGUF metadata."""

from __future__ import annotations

import math
import struct
from typing import Any, Final

from ..errors import CheckpointError
from ..formats import GGUFFile
from .facts import ModelConfig, MoEConfig, RopeConfig
from .gguf_keys import check_keys
from .keys import MAX_INTEGER, MOST_LAYERS
from .rope import DEFAULT_THETA, FACTORS, THETAS

__all__ = ["GGUF_MODEL_TYPES", "read_gguf"]

GGUF_MODEL_TYPES: Final = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""GGUF architecture -> Hugging Face model_type and architecture."""

_FILE_TYPE_DTYPES: Final = {1: "float16", 32: "bfloat16"}
"""``general.file_type`` of files that are mostly float16 or bfloat16; quantised ones run in float32 on a CPU."""
_F32: Final = 0
_PLAIN_TYPES: Final = {0, 1, 28, 30}
"""Tensor types F32, F16, F64 and BF16."""


def read_gguf(file: GGUFFile) -> ModelConfig:
    """The model of a GGUF file.

    Raises :class:`~minisgl_core.errors.CheckpointError` for an architecture or a rope kind that is not supported.
    """
    arch = file.architecture
    if arch not in GGUF_MODEL_TYPES:
        raise _error(file, "general.architecture", arch, f"minisgl reads {', '.join(GGUF_MODEL_TYPES)}")
    model_type, architecture = GGUF_MODEL_TYPES[arch]
    if arch != "qwen3moe" and (experts := file.metadata.get(f"{arch}.expert_count")):
        raise _error(file, f"{arch}.expert_count", experts, "of models with experts, minisgl reads qwen3moe")
    heads, hidden = _integer(file, "attention.head_count"), _integer(file, "embedding_length")
    kv_heads = _integer(file, "attention.head_count_kv", heads)
    if heads % kv_heads:
        raise _error(file, f"{arch}.attention.head_count_kv", kv_heads, f"it must divide the {heads} query heads")
    head_dim = _integer(file, "attention.key_length", hidden // heads)
    _check_attention(file, head_dim)
    check_keys(file.metadata, arch, _rope_kind(file), str(file.path), moe=arch == "qwen3moe")
    num_layers = _integer(file, "block_count", high=MOST_LAYERS)
    context = _integer(file, "context_length")
    window = _integer(file, "attention.sliding_window", 0, low=0) or None
    dtype = _dtype(file)
    return ModelConfig(
        architecture="MistralForCausalLM" if arch == "llama" and window else architecture,
        model_type="mistral" if arch == "llama" and window else model_type,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        num_layers=num_layers,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_integer(file, "feed_forward_length", 0, low=0),
        rms_norm_eps=round(_number(file, "attention.layer_norm_rms_epsilon", low=1e-11, high=1.0), 12),
        rope=_rope(file, head_dim, context),
        max_position_embeddings=context,
        tie_word_embeddings="output.weight" not in file.tensors,
        dtype=dtype,
        quantised=dtype == "float32" and any(tensor.type_id not in _PLAIN_TYPES for tensor in file.tensors.values()),
        file_bytes=file.num_bytes,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        windows=(window,) * num_layers,
        moe=_moe(file, num_layers) if arch == "qwen3moe" else None,
        eos_token_ids=_token_ids(file, "eos", "eot", "eom"),  # end of sequence, of a turn, of a message
        bos_token_id=next(iter(_token_ids(file, "bos")), None),
    )


def _error(file: GGUFFile, key: str, value: object, remedy: str) -> CheckpointError:
    return CheckpointError(
        f"GGUF file {str(file.path)!r} has `{key}` = {value!r:.80}", field=key, value=value, remedy=remedy
    )


def _integer(file: GGUFFile, suffix: str, default: int | None = None, *, low: int = 1, high: int = MAX_INTEGER) -> int:
    key, value = _found(file, suffix, default)
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _error(file, key, value, f"it must be one integer for all layers, from {low} to {high}")
    return value


def _number(file: GGUFFile, suffix: str, default: float | None = None, *, low: float, high: float) -> float:
    key, value = _found(file, suffix, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise _error(file, key, value, f"it must be a number from {low:g} to {high:g}")
    return float(value)


def _flag(file: GGUFFile, suffix: str, default: bool) -> bool:
    key, value = _found(file, suffix, default)
    if not isinstance(value, bool):
        raise _error(file, key, value, "it must be true or false")
    return value


def _found(file: GGUFFile, suffix: str, default: object) -> tuple[str, Any]:
    """(key, value); raises if the key is missing and there is no default."""
    key = f"{file.architecture}.{suffix}"
    value = file.metadata.get(key, default)
    return key, file.require(key) if value is None else value


def _vocab_size(file: GGUFFile) -> int:
    """Number of rows of the embedding, padding included."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise _error(file, "token_embd.weight", None, "the file holds no embedding: it is not a whole model")
    if len(embedding.shape) != 2 or not 0 < embedding.shape[0] <= MAX_INTEGER:
        raise _error(file, "token_embd.weight", embedding.shape, "an embedding is a matrix of one row per token")
    return embedding.shape[0]


def _dtype(file: GGUFFile) -> str:
    kind = file.metadata.get("general.file_type", _F32)
    return _FILE_TYPE_DTYPES.get(kind, "float32") if isinstance(kind, int) else "float32"


def _check_attention(file: GGUFFile, head_dim: int) -> None:
    """Refuse values that the format allows and minisgl does not support."""
    width = _integer(file, "attention.value_length", head_dim)
    if width != head_dim:
        raise _error(file, f"{file.architecture}.attention.value_length", width, f"keys have {head_dim}: give another")
    scale = _number(file, "attention.scale", 0.0, low=-FACTORS[1], high=FACTORS[1])
    if scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-5):
        raise _error(
            file, f"{file.architecture}.attention.scale", scale, f"minisgl computes {head_dim**-0.5:g} for this model"
        )


def _rope_kind(file: GGUFFile) -> str:
    """``none``, ``linear`` or ``yarn``. A factor without a kind is linear."""
    arch = file.architecture
    named = [f"{arch}.rope.scaling.factor", f"{arch}.rope.scale_linear"]
    scaled = any(file.metadata.get(key) not in (None, 0, 1) for key in named)
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "linear" if scaled else "none")
    if kind not in ("none", "linear", "yarn"):
        raise _error(file, f"{arch}.rope.scaling.type", kind, "minisgl reads none, linear and yarn from GGUF")
    return str(kind)


def _rope(file: GGUFFile, head_dim: int, context: int) -> RopeConfig:
    arch, kind = file.architecture, _rope_kind(file)
    rotary_dim = _integer(file, "rope.dimension_count", head_dim, high=head_dim)
    if rotary_dim % 2:
        raise _error(file, f"{arch}.rope.dimension_count", rotary_dim, "it must be even: pairs are turned")
    divisors = _divisors(file)
    if divisors and kind != "none":
        raise _error(file, f"{arch}.rope.scaling.type", kind, "the file has rope_freqs.weight as well: one must go")
    fast, slow = _betas(file) if kind == "yarn" else (32.0, 1.0)
    return RopeConfig(
        theta=_number(file, "rope.freq_base", DEFAULT_THETA, low=THETAS[0], high=THETAS[1]),
        rotary_dim=rotary_dim,
        kind="yarn" if kind == "yarn" else "linear" if kind == "linear" else "default",
        factor=1.0 if kind == "none" else _factor(file),
        original_max_position=_integer(file, "rope.scaling.original_context_length", context),
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=_attention_factor(file) if kind == "yarn" else None,
        divisors=divisors,
    )


def _factor(file: GGUFFile) -> float:
    """The scaling factor. 0 means unset; the older key is used if the newer one is unset."""
    for suffix in ("rope.scaling.factor", "rope.scale_linear"):
        if file.metadata.get(f"{file.architecture}.{suffix}") not in (None, 0):
            return _number(file, suffix, low=FACTORS[0], high=FACTORS[1])
    return 1.0


def _betas(file: GGUFFile) -> tuple[float, float]:
    """The numbers of rotations between which yarn interpolates."""
    low, high = FACTORS
    fast = _number(file, "rope.scaling.yarn_beta_fast", 32.0, low=low, high=high)
    slow = _number(file, "rope.scaling.yarn_beta_slow", 1.0, low=low, high=high)
    if fast < slow:
        key = f"{file.architecture}.rope.scaling.yarn_beta_fast"
        raise _error(file, key, fast, f"it must be at least yarn_beta_slow, which is {slow:g}")
    return fast, slow


def _attention_factor(file: GGUFFile) -> float | None:
    """The factor for sines and cosines: converters copy transformers' ``attention_factor``."""
    key = "rope.scaling.yarn_attn_factor"
    absent = file.metadata.get(f"{file.architecture}.{key}") is None
    return None if absent else _number(file, key, low=FACTORS[0], high=FACTORS[1])


def _divisors(file: GGUFFile) -> tuple[float, ...]:
    """The divisors of llama3 scaling, which GGUF stores per frequency in a separate tensor."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return ()
    if tensor.type_id != _F32 or len(tensor.shape) != 1:
        raise _error(file, "rope_freqs.weight", tensor, "it must be a float32 vector")
    with tensor.path.open("rb") as content:
        content.seek(tensor.start)
        found = content.read(4 * tensor.shape[0])
    if len(found) < 4 * tensor.shape[0]:
        raise _error(file, "rope_freqs.weight", tensor, "the file ends inside it: download it again")
    divisors = struct.unpack(f"<{tensor.shape[0]}f", found)
    if not all(FACTORS[0] <= divisor <= FACTORS[1] for divisor in divisors):
        raise _error(file, "rope_freqs.weight", tensor, f"it must hold numbers from {FACTORS[0]:g} to {FACTORS[1]:g}")
    return divisors


def _moe(file: GGUFFile, num_layers: int) -> MoEConfig:
    layers = tuple(layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors)
    num_experts = _integer(file, "expert_count")
    return MoEConfig(
        num_experts=num_experts,
        top_k=_integer(file, "expert_used_count", high=num_experts),
        intermediate_size=_integer(file, "expert_feed_forward_length"),
        norm_topk_prob=_flag(file, "expert_weights_norm", True),  # older files lack it: the architecture's own way
        layers=layers,
    )


def _token_ids(file: GGUFFile, *names: str) -> tuple[int, ...]:
    """The ids of the special tokens with these names that the file has."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in names]
    found = {key: file.metadata[key] for key in keys if key in file.metadata}
    for key, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _error(file, key, value, "it must be a token id")
    return tuple(dict.fromkeys(found.values()))
