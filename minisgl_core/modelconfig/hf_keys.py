"""The treatment of each key of config.json, of its rope settings and of generation_config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ..inputs import Gate, Rule, ignored, refused, used, warned
from .families import Family

__all__ = ["CONFIG_GATE", "GENERATION_GATE", "ROPE_GATE", "check_family", "check_rope_kind"]

_UNSUPPORTED: Final = "the architectures in minisgl do not compute it, so answers would be wrong"
_OTHER_MODEL: Final = "use a model without it, or a plugin that brings its architecture"
_TRAINING: Final = "training only"
_API: Final = "a setting of the transformers library, not of the model"
_CLASSIFIER: Final = "classification heads only"
_PER_REQUEST: Final = "minisgl takes sampling parameters from each request alone"


def _off(*neutral: object) -> Rule:
    """The rule for a key of an unsupported feature."""
    return refused(_UNSUPPORTED, _OTHER_MODEL, *neutral)


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_GENERATION_RULES: Final[Mapping[str, Rule]] = {
    "eos_token_id": used("ids that end an answer, together with those of config.json"),
    "bos_token_id": used("beginning of a text, if config.json has no such key"),
    **_each("pad_token_id", ignored("minisgl pads no prompt")),
    **_each("transformers_version _from_model_config", ignored("where the file comes from")),
    **_each("do_sample", ignored("`temperature` of a request says whether to sample")),
    **_each("max_length max_new_tokens max_time", ignored("`max_tokens` of a request and the context decide")),
    **_each(
        "use_cache cache_implementation cache_config max_cache_len prefill_chunk_size compile_config disable_compile "
        "continuous_batching_config low_memory return_dict_in_generate output_attentions output_hidden_states "
        "output_scores output_logits remove_invalid_values",
        ignored(_API),
    ),
    **_each(
        "is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
        "assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type "
        "use_mtp prompt_lookup_num_tokens max_matching_ngram_size token_healing",
        ignored("drafting methods of the transformers library"),
    ),
    "decoder_start_token_id": ignored("encoder-decoder models only"),
    **_each("temperature top_p typical_p repetition_penalty", warned(_PER_REQUEST, 1)),
    **_each("top_k min_p epsilon_cutoff eta_cutoff", warned(_PER_REQUEST, 0)),
    **_each("top_h stop_strings sequence_bias guidance_scale watermarking_config", warned(_PER_REQUEST)),
    **_each("min_length min_new_tokens no_repeat_ngram_size", warned(_PER_REQUEST, 0)),
    **_each("bad_words_ids suppress_tokens begin_suppress_tokens force_words_ids", warned(_PER_REQUEST, [])),
    **_each("forced_bos_token_id forced_eos_token_id constraints", warned(_PER_REQUEST)),
    **_each("exponential_decay_length_penalty penalty_alpha dola_layers", warned(_PER_REQUEST)),
    **_each("renormalize_logits early_stopping", warned(_PER_REQUEST, False)),
    **_each("num_beams num_beam_groups num_return_sequences length_penalty", warned(_PER_REQUEST, 1)),
    **_each("encoder_repetition_penalty", warned(_PER_REQUEST, 1)),
    **_each("diversity_penalty encoder_no_repeat_ngram_size", warned(_PER_REQUEST, 0)),
}

GENERATION_GATE: Final = Gate("generation_config.json", _GENERATION_RULES)

CONFIG_GATE: Final = Gate(
    "config.json",
    {
        **{
            key: rule for key, rule in _GENERATION_RULES.items() if rule.fate != "used"
        },  # transformers 4 kept them here
        "architectures": used("the model class; the first name counts"),
        "model_type": used("the family, with its defaults"),
        "vocab_size": used("rows of the embedding"),
        "hidden_size": used("width"),
        "num_hidden_layers": used("layers"),
        "num_attention_heads": used("query heads"),
        "num_key_value_heads": used("kv heads"),
        "head_dim": used("width of a head"),
        "intermediate_size": used("width of the dense MLP"),
        "hidden_act": used("activation; refused unless silu or swish"),
        "rms_norm_eps": used("epsilon of the norms"),
        "max_position_embeddings": used("context length"),
        "original_max_position_embeddings": used("trained length of llama3 and yarn rope"),
        "rope_theta": used("base of rope"),
        "rope_scaling": used("rope settings, see below"),
        "rope_parameters": used("rope settings, see below"),
        "partial_rotary_factor": used("rotated part of a head; refused unless 1, but for families of plugins"),
        "tie_word_embeddings": used("whether the head shares the embedding, unless the weights say otherwise"),
        "dtype": used("compute dtype of `auto`"),
        "torch_dtype": used("compute dtype of `auto`, the older spelling"),
        "eos_token_id": used("ids that end an answer"),
        "bos_token_id": used("beginning of a text"),
        "quantization_config": used("refused unless empty: use an unquantised folder or a GGUF file"),
        "quantization": used("refused unless empty: use an unquantised folder or a GGUF file"),
        "attention_bias": used("biases of q, k, v and the output (Llama, Qwen3)"),
        "mlp_bias": used("biases of the MLP (Llama)"),
        "qkv_bias": used("biases of q, k and v (Qwen2-MoE)"),
        "sliding_window": used("window of attention (all but Llama)"),
        "use_sliding_window": used("whether it has the window (Qwen)"),
        "max_window_layers": used("which layers have the window (Qwen)"),
        "layer_types": used("which layers have the window"),
        "num_experts": used("experts (MoE)"),
        "num_local_experts": used("experts, the other spelling (MoE)"),
        "num_experts_per_tok": used("experts per token (MoE)"),
        "moe_intermediate_size": used("width of an expert (MoE)"),
        "norm_topk_prob": used("whether the chosen experts' weights are normalised (MoE)"),
        "decoder_sparse_step": used("every which layer is sparse (MoE)"),
        "mlp_only_layers": used("layers without experts (MoE)"),
        "shared_expert_intermediate_size": used("width of the shared expert (Qwen2-MoE)"),
        **_each("transformers_version _name_or_path name_or_path _commit_hash", ignored("where the file comes from")),
        **_each("unsloth_version unsloth_fixed is_llama_config", ignored("where the file comes from")),
        "transformers.js_config": ignored("for another library"),
        **_each(
            "initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop attention_probs_dropout_prob "
            "hidden_dropout_prob router_aux_loss_coef output_router_logits gradient_checkpointing neftune_noise_alpha",
            ignored(_TRAINING),
        ),
        "pretraining_tp": ignored("how products were cut in training; they are the same products"),
        **_each(
            "use_cache return_dict use_return_dict output_attentions output_hidden_states torchscript "
            "attn_implementation _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled "
            "chunk_size_feed_forward use_bfloat16 tf_legacy_loss",
            ignored(_API),
        ),
        **_each("id2label label2id num_labels problem_type finetuning_task classifier_dropout", ignored(_CLASSIFIER)),
        **_each("task_specific_params tokenizer_class prefix pad_token_id sep_token_id", ignored("not of the network")),
        **_each("num_nextn_predict_layers", ignored("layers that draft tokens, which no answer needs")),
        "is_decoder": ignored("every architecture here is a decoder"),
        "auto_map": warned("it names Python code of the checkpoint, which minisgl never runs", {}),
        **_each("is_encoder_decoder add_cross_attention tie_encoder_decoder", _off(False)),
        **_each("cross_attention_hidden_size", _off()),
        "pruned_heads": _off({}, []),
        **_each("attn_logit_softcapping final_logit_softcapping router_logit_softcapping", _off(0)),
        **_each("attention_multiplier query_pre_attn_scalar clip_qkv", _off()),
        **_each("embedding_multiplier residual_multiplier logits_scaling logit_scale embedding_scale", _off(1)),
        **_each("use_qk_norm qk_layernorm use_alibi alibi use_mrope parallel_residual", _off(False)),
        "rope_interleaved": _off(False),
        **_each("rotary_pct rotary_emb_fraction rope_ratio", _off(1)),
        **_each("no_rope_layers attention_chunk_size", _off([])),
        **_each("num_kv_shared_layers first_k_dense_replace n_shared_experts", _off(0)),
        **_each("n_group topk_group routed_scaling_factor", _off(1)),
        "scoring_func": _off("softmax"),
        **_each("kv_lora_rank q_lora_rank", _off()),
        **_each("hidden_activation activation", _off("silu", "swish")),
    },
)

ROPE_GATE: Final = Gate(
    "config.json: rope_parameters, rope_scaling",
    {
        "rope_type": used("the kind; refused unless default, linear, dynamic, llama3 or yarn"),
        "type": used("the kind, the older spelling"),
        "rope_theta": used("base"),
        "partial_rotary_factor": used("rotated part of a head"),
        "factor": used("how far positions or frequencies are stretched"),
        "original_max_position_embeddings": used("trained length (llama3, yarn)"),
        "low_freq_factor": used("llama3"),
        "high_freq_factor": used("llama3"),
        "beta_fast": used("yarn"),
        "beta_slow": used("yarn"),
        "attention_factor": used("yarn"),
        "mscale": used("yarn"),
        "mscale_all_dim": used("yarn"),
        "truncate": used("yarn"),
        **_each("finetuned", ignored("whether the model was trained with the scaling")),
        **_each("mrope_section mrope_interleaved", ignored("text has the same position in every section")),
        **_each("max_position_embeddings", ignored("the key of config.json itself counts")),
        **_each("attn_factor extrapolation_factor", _off(1)),
        **_each("alpha long_factor short_factor long_mscale short_mscale", _off()),
    },
)

_KINDS_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "factor": ("linear", "dynamic", "llama3", "yarn"),
    "original_max_position_embeddings": ("llama3", "yarn"),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("llama3",)),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"), ("yarn",)),
}
"""Rope settings that exist only for some kinds."""


def check_rope_kind(settings: Mapping[str, object], kind: str, where: str) -> None:
    """Warn about settings that this kind of rope does not have."""
    for key, kinds in _KINDS_OF.items():
        if kind not in kinds:
            neutral = (1,) if key == "factor" else ()
            _warn_misplaced(key, settings.get(key), where, f"rope of kind {kind!r} has no such setting", *neutral)


_MOE_KEYS: Final = (
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)
_OWNERS: Final[Mapping[str, Callable[[Family], bool]]] = {
    "attention_bias": lambda family: "attention_bias" in (family.qkv_bias, family.o_bias),
    "mlp_bias": lambda family: family.mlp_bias == "mlp_bias",
    "qkv_bias": lambda family: family.qkv_bias == "qkv_bias",
    "sliding_window": lambda family: family.windows != "none",
    "use_sliding_window": lambda family: family.windows.startswith("switched"),
    "max_window_layers": lambda family: family.windows.startswith("switched"),
    "shared_expert_intermediate_size": lambda family: family.shared_expert,
    **dict.fromkeys(_MOE_KEYS, lambda family: family.moe),
}
"""Keys that only some families read."""


def check_family(content: Mapping[str, Any], family: Family, model_type: str, where: str) -> None:
    """Warn about keys of config.json that are read for other families only, unless they switch something off."""
    neutral: tuple[object, ...] = (False, 0, [])
    for key, owns in _OWNERS.items():
        if not owns(family):
            own = (family.windows == "all",) if key == "use_sliding_window" else neutral
            own = (*own, 1) if key == "decoder_sparse_step" else own
            _warn_misplaced(key, content.get(key), where, f"{model_type} models have no such setting", *own)


def _warn_misplaced(key: str, value: object, where: str, why: str, *neutral: object) -> None:
    Gate("", {key: warned(why, *neutral)}).check({key: value}, where)
