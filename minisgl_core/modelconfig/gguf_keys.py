"""The treatment of each metadata key of a GGUF file. The names are those of the ``gguf`` library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..inputs import Gate, Rule, ignored, refused, used, warned

__all__ = ["ARCHITECTURE_GATE", "GENERAL_GATE", "YARN_KEYS", "check_keys"]

_UNSUPPORTED: Final = "the architectures in minisgl do not compute it, so answers would be wrong"
_OTHER_MODEL: Final = "use a model without it"


def _off(*neutral: object) -> Rule:
    """The rule for a key of an unsupported feature."""
    return refused(_UNSUPPORTED, _OTHER_MODEL, *neutral)


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


GENERAL_GATE: Final = Gate(
    "GGUF metadata",
    {
        "general.architecture": used("the model class; refused unless llama, qwen2, qwen3 or qwen3moe"),
        "general.file_type": used("compute dtype of `auto`, for files in float16 and bfloat16"),
        "general.alignment": used("where tensors begin"),
        "general.type": refused("it is no whole model", "give the model's own file", "model"),
        "general.quantization_version": refused("minisgl reads version 2 of the formats", "convert it again", 2),
        "general.sampling.*": warned("minisgl takes sampling parameters from each request alone"),
        "general.*": ignored("describes the model"),
        "split.*": used("which files are parts of one model"),
        "tokenizer.ggml.eos_token_id": used("end of an answer"),
        "tokenizer.ggml.eot_token_id": used("end of a turn ends an answer too"),
        "tokenizer.ggml.eom_token_id": used("end of a message ends an answer too"),
        "tokenizer.ggml.bos_token_id": used("beginning of a text"),
        "tokenizer.*": used("the tokenizer, see below"),
        "quantize.*": ignored("how the file was quantised"),
        "adapter.*": refused("it is an adapter, not a model", "merge it into its model and convert that"),
    },
)
"""All keys but those that begin with the architecture's name."""

ARCHITECTURE_GATE: Final = Gate(
    "GGUF metadata: keys of the architecture",
    {
        "context_length": used("context length"),
        "embedding_length": used("width"),
        "block_count": used("layers"),
        "feed_forward_length": used("width of the dense MLP"),
        "attention.head_count": used("query heads"),
        "attention.head_count_kv": used("kv heads"),
        "attention.key_length": used("width of a head"),
        "attention.value_length": used("refused unless it is the width of a key"),
        "attention.layer_norm_rms_epsilon": used("epsilon of the norms"),
        "attention.sliding_window": used("window of all layers"),
        "attention.scale": used("refused unless it is 1 / sqrt(width of a head), or 0"),
        "rope.dimension_count": used("rotated part of a head"),
        "rope.freq_base": used("base of rope"),
        "rope.scaling.type": used(
            "kind of rope; refused unless none, linear or yarn; linear if only a factor is given"
        ),
        "rope.scaling.factor": used("how far positions or frequencies are stretched"),
        "rope.scale_linear": used("the older name of the factor"),
        "rope.scaling.original_context_length": used("trained length (yarn)"),
        "rope.scaling.yarn_beta_fast": used("yarn's `beta_fast`"),
        "rope.scaling.yarn_beta_slow": used("yarn's `beta_slow`"),
        "rope.scaling.yarn_attn_factor": used("yarn's `attention_factor`, as converters write it"),
        "rope.scaling.yarn_ext_factor": _off(1, -1),
        "rope.scaling.yarn_log_multiplier": _off(0),
        "rope.scaling.attn_factor": _off(1),
        "rope.scaling.finetuned": ignored("whether the model was trained with the scaling"),
        "rope.dimension_sections": _off([], [0, 0, 0, 0]),
        "rope.*": _off(0),
        "attention.causal": _off(True),
        "attention.layer_norm_epsilon": ignored("no architecture in minisgl has such norms"),
        "attention.*": _off(0, False),
        "expert_count": used("experts; refused unless qwen3moe"),
        "expert_used_count": used("experts per token"),
        "expert_feed_forward_length": used("width of an expert"),
        "expert_weights_norm": used("whether the chosen experts' weights are normalised; true if absent"),
        **_each("expert_weights_scale expert_group_count expert_group_used_count", _off(0, 1)),
        "expert_gating_func": _off(0, 1),
        **_each("expert* n_deepstack_layers nextn_predict_layers", _off(0, False)),
        **_each(
            "leading_dense_block_count moe_every_n_layers interleave_moe_layer_step",
            ignored("the tensors say which layers have experts"),
        ),
        "vocab_size": ignored("the rows of the embedding count"),
        "tensor_data_layout": ignored("the architecture says how rows are stored"),
        "pooling_type": ignored("embeddings only"),
        **_each("use_parallel_residual swin_norm", _off(False)),
        **_each("logit_scale residual_scale embedding_scale", _off(0, 1)),
        **_each("attn_logit_softcapping final_logit_softcapping router_logit_softcapping", _off(0)),
        **_each("activation_sparsity_scale swiglu_clamp_exp swiglu_clamp_shexp altup.*", _off(0)),
        **_each("full_attention_interval embedding_length_out embedding_length_per_layer_input", _off(0)),
        **_each("ssm.* wkv.* kda.* shortconv.*", _off(0, False)),
    },
)
"""Keys after the architecture's name and a dot."""

YARN_KEYS: Final = tuple(
    f"rope.scaling.{name}" for name in ("yarn_beta_fast", "yarn_beta_slow", "yarn_attn_factor", "yarn_ext_factor")
)
_FACTOR_KEYS: Final = ("rope.scaling.factor", "rope.scale_linear")
_EXPERT_KEYS: Final = ("expert_used_count", "expert_feed_forward_length", "expert_weights_norm")


def check_keys(metadata: Mapping[str, Any], arch: str, kind: str, where: str, *, moe: bool) -> None:
    """Refuse, or warn about, all keys that are not used. ``kind``: of rope, as a GGUF names it."""
    prefix = f"{arch}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    GENERAL_GATE.check({key: value for key, value in metadata.items() if not key.startswith(prefix)}, where)
    for keys, applies, why, neutral in (
        (YARN_KEYS, kind == "yarn", f"rope of kind {kind!r} has no such setting", -1),
        (("rope.scaling.original_context_length",), kind == "yarn", f"rope of kind {kind!r} has no such setting", 0),
        (_FACTOR_KEYS, kind != "none", f"rope of kind {kind!r} has no such setting", 1),
        (_EXPERT_KEYS, moe, f"{arch} models have no experts", 0),
    ):
        if not applies:
            found = {key: own.pop(key) for key in keys if key in own}
            Gate("", dict.fromkeys(found, warned(why, neutral, 0))).check(found, where, prefix)
    ARCHITECTURE_GATE.check(own, where, prefix)
