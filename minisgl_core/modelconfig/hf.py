"""Reads a Hugging Face folder: config.json in the spellings of transformers 4 and 5, and generation_config.json."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError
from ..formats import read_json
from .facts import ModelConfig, MoEConfig
from .families import ANY_FAMILY, FAMILIES, Family
from .hf_keys import CONFIG_GATE, GENERATION_GATE, check_family
from .keys import MOST_LAYERS, Keys
from .rope import read_rope

__all__ = ["config_from_dict", "read_hf_folder"]

_DTYPES: Final = ("float32", "bfloat16", "float16")
_SAFETENSORS_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")
_GENERIC_KEYS: Final = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def read_hf_folder(folder: Path) -> ModelConfig:
    """The configuration of a folder with a config.json."""
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(
            f"model folder {str(folder)!r} has no config.json",
            field="model",
            value=str(folder),
            remedy="give a folder in Hugging Face format or a .gguf file",
        )
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    GENERATION_GATE.check(generation, str(generation_path))
    return config_from_dict(read_json(path), generation, where=str(path), folder=folder)


def config_from_dict(
    content: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    *,
    where: str = "config.json",
    folder: Path | None = None,
) -> ModelConfig:
    """The configuration from the content of a config.json.

    ``folder`` has the weights, from which a missing dtype is read. Raises :class:`~minisgl_core.errors.CheckpointError`
    for a missing key, an invalid value, or anything that minisgl would compute differently from what the model means.
    """
    keys = Keys(content, where)
    model_type, family, architecture = _identify(keys)
    _refuse_unsupported(keys)
    end = Keys(generation or {}, "generation_config.json")
    if family is not ANY_FAMILY:  # a model plugin may read any other key
        CONFIG_GATE.check(content, where)
        check_family(content, family, model_type, where)
    heads = keys.integer("num_attention_heads")
    kv_heads = _kv_heads(keys, family, heads)
    head_dim = _head_dim(keys, family, heads)
    max_position = keys.integer("max_position_embeddings", family.max_position)
    num_layers = keys.integer("num_hidden_layers", high=MOST_LAYERS)
    return ModelConfig(
        architecture=architecture,
        model_type=model_type,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_layers=num_layers,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.integer("intermediate_size"),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6, low=1e-30, high=1.0),
        rope=read_rope(keys, head_dim, max_position, model_type, partial=family.partial_rotary),
        max_position_embeddings=max_position,
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        dtype=_dtype(keys, folder),
        qkv_bias=_switch(keys, family, family.qkv_bias),
        o_bias=_switch(keys, family, family.o_bias),
        mlp_bias=_switch(keys, family, family.mlp_bias),
        qk_norm=family.qk_norm,
        windows=_windows(keys, family, num_layers),
        moe=_moe(keys, family, num_layers),
        eos_token_ids=_eos(keys, family, end),
        bos_token_id=_bos(keys, family, end),
        raw=dict(content),
    )


def _identify(keys: Keys) -> tuple[str, Family, str]:
    """(model_type, family, architecture). An unknown family is read by the usual keys, if it has them."""
    names = keys.texts("architectures")
    named = names[0] if names else ""
    model_type = keys.text("model_type") or ""
    if model_type in FAMILIES:
        family = FAMILIES[model_type]
        return model_type, family, named or family.architecture
    for known_type, family in FAMILIES.items():
        if named == family.architecture:
            return known_type, family, named
    if not named or any(keys.get(key) is None for key in _GENERIC_KEYS):
        raise keys.error(
            "architectures",
            f"names no architecture that minisgl can read: {named or model_type or None!r:.80}",
            f"known ones are {', '.join(family.architecture for family in FAMILIES.values())}",
        )
    return model_type, ANY_FAMILY, named


def _refuse_unsupported(keys: Keys) -> None:
    for key in ("quantization_config", "quantization"):
        if keys.get(key):
            raise keys.error(key, "says that the weights are quantised", "use an unquantised folder or a GGUF file")
    act = keys.get("hidden_act")
    if act not in (None, "silu", "swish"):
        raise keys.wrong("hidden_act", "minisgl supports silu")


def _kv_heads(keys: Keys, family: Family, heads: int) -> int:
    absent = family.kv_heads if family.kv_heads and "num_key_value_heads" not in keys.content else heads
    kv_heads = keys.integer("num_key_value_heads", absent)
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", f"is {kv_heads}", f"it must divide the {heads} query heads")
    return kv_heads


def _head_dim(keys: Keys, family: Family, heads: int) -> int:
    hidden = keys.integer("hidden_size")
    derived = keys.get("head_dim") is None and family.head_dim is None
    if derived and hidden % heads:
        raise keys.error(
            "head_dim", "is missing", f"add it: hidden_size {hidden} is not a multiple of {heads} attention heads"
        )
    head_dim = keys.integer("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        problem = f"would be {hidden} / {heads} = {head_dim}" if derived else f"is {head_dim}"
        raise keys.error("head_dim", problem, "it must be even: rotary embedding turns pairs of dimensions")
    return head_dim


def _switch(keys: Keys, family: Family, rule: bool | str) -> bool:
    if isinstance(rule, bool):
        return rule
    return keys.flag(rule, rule in family.on_by_default)


def _dtype(keys: Keys, folder: Path | None) -> str:
    spelling = "torch_dtype" if keys.get("dtype") is None else "dtype"
    name = keys.text(spelling)
    if name is None or name == "auto":
        return _dtype_of_weights(folder)
    plain = name.removeprefix("torch.")
    if plain not in _DTYPES:
        raise keys.error("dtype", f"is {name!r:.80}", f"minisgl runs {', '.join(_DTYPES)}")
    return plain


def _dtype_of_weights(folder: Path | None) -> str:
    """The dtype of the first floating tensor of the first safetensors file; float32 if there is none."""
    for path in sorted(folder.glob("*.safetensors")) if folder else ():
        for name, entry in _safetensors_header(path).items():
            stored = entry.get("dtype") if name != "__metadata__" and isinstance(entry, Mapping) else None
            if isinstance(stored, str) and stored in _SAFETENSORS_DTYPES:
                return _SAFETENSORS_DTYPES[stored]
    return "float32"


def _safetensors_header(path: Path) -> Mapping[str, Any]:
    """The header; empty for a broken file, which is reported by name when weights are loaded."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, path.stat().st_size)))
    except (OSError, struct.error, ValueError, RecursionError):
        return {}
    return header if isinstance(header, Mapping) else {}


def _windows(keys: Keys, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer. ``layer_types``, if given, decides which layers have one."""
    absent = family.window if "sliding_window" not in keys.content else None
    window = keys.integer("sliding_window", absent or 0, low=0) or None
    switched_off = family.windows.startswith("switched") and not keys.flag("use_sliding_window", False)
    if family.windows == "none" or switched_off:
        window = None
    if window is None and family is ANY_FAMILY:
        return (None,) * num_layers  # layers may be of kinds that only the plugin knows
    windowed = _windowed_layers(keys, family, num_layers)
    return tuple(window if has_window else None for has_window in windowed)


def _windowed_layers(keys: Keys, family: Family, num_layers: int) -> list[bool]:
    types = keys.texts("layer_types")
    if types is not None:
        if len(types) < num_layers or any(kind not in _LAYER_TYPES for kind in types):
            raise keys.wrong("layer_types", f"it must list {num_layers} of {' or '.join(map(repr, _LAYER_TYPES))}")
        return [kind == "sliding_attention" for kind in types[:num_layers]]
    limit = keys.integer("max_window_layers", family.window_layers, low=0)
    if family.windows == "switched_upper":
        return [layer >= limit for layer in range(num_layers)]
    if family.windows == "switched_alternate":
        return [layer % 2 == 0 and layer < limit for layer in range(num_layers)]
    return [True] * num_layers


def _moe(keys: Keys, family: Family, num_layers: int) -> MoEConfig | None:
    if not family.moe:
        return None
    spelling = "num_local_experts" if keys.get("num_experts") is None else "num_experts"
    num_experts = keys.integer(spelling)
    top_k = keys.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise keys.error("num_experts_per_tok", f"is {top_k}", f"there are only {num_experts} experts")
    step = keys.integer("decoder_sparse_step", 1)
    dense = frozenset(keys.integers("mlp_only_layers"))
    layers = tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    if not layers:
        return None
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=keys.integer("moe_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob", False),
        layers=layers,
        shared_intermediate_size=keys.integer("shared_expert_intermediate_size", 5632) if family.shared_expert else 0,
    )


def _eos(keys: Keys, family: Family, generation: Keys) -> tuple[int, ...]:
    """The ids of both files; the family's default only if neither has any."""
    own = keys.token_ids("eos_token_id")
    if not _says(keys, "eos_token_id") and not _says(generation, "eos_token_id") and family.eos is not None:
        own = (family.eos,)
    return tuple(dict.fromkeys(own + generation.token_ids("eos_token_id")))


def _bos(keys: Keys, family: Family, generation: Keys) -> int | None:
    for source in (keys, generation):
        if _says(source, "bos_token_id"):
            return next(iter(source.token_ids("bos_token_id")), None)
    return family.bos


def _says(keys: Keys, key: str) -> bool:
    """True if the key is present. Null counts: transformers 5 writes it for a model without such a token."""
    return key in keys.content
