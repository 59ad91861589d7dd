"""The treatment of each key of the tokenizer files of a Hugging Face folder, and of a GGUF file's tokenizer keys."""

from __future__ import annotations

from typing import Final

from ..inputs import Gate, Rule, ignored, used, warned

__all__ = ["GGUF_GATE", "ROLES", "SPECIAL_MAP_GATE", "TOKENIZER_GATE", "TOKEN_FLAGS"]

ROLES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens with standard names. A model may name others, also by keys that end in `_token`."""
TOKEN_FLAGS: Final = ("lstrip", "rstrip", "single_word", "normalized", "special")


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_DECIDES: Final = used("compared with tokenizer.json, which decides; a difference is a warning")

_NAMED: Final = {
    **_each(" ".join(ROLES), used("a special token and a variable of the chat template, as any key `..._token`")),
    "extra_special_tokens": used("special tokens; if they have names, variables of the chat template as well"),
    "additional_special_tokens": used("special tokens, where `extra_special_tokens` lists none"),
    "model_specific_special_tokens": used("special tokens with names, variables of the chat template"),
}

SPECIAL_MAP_GATE: Final = Gate("special_tokens_map.json", _NAMED)
"""Where tokenizer_config.json has `added_tokens_decoder`, the file is not read and each difference is a warning."""

TOKENIZER_GATE: Final = Gate(
    "tokenizer_config.json",
    {
        **_NAMED,
        "added_tokens_decoder": used("added tokens; their flags win over those of tokenizer.json"),
        "chat_template": used("the chat template, unless the folder has chat_template.jinja"),
        "split_special_tokens": used("whether special tokens in a prompt are cut like other text"),
        "tokenizer_class": used("how to convert a folder without tokenizer.json"),
        "add_bos_token": _DECIDES,
        "add_eos_token": _DECIDES,
        "add_prefix_space": _DECIDES,
        "clean_up_tokenization_spaces": used(
            "a warning where the tokenizer is not BPE: no space of an answer is removed"
        ),
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": warned(
            "no space of an answer is removed", False
        ),
        "auto_map": warned("code of model folders is not run"),
        "fast_tokenizer_files": warned("tokenizer.json is read, not another version of it"),
        **_each(
            "add_dummy_prefix_space byte_fallback do_basic_tokenize do_lower_case do_split_by_punc errors from_slow "
            "keep_accents legacy merges_file never_split remove_space sp_model_kwargs spaces_between_special_tokens "
            "strip_accents tokenize_chinese_chars tokenizer_file trim_offsets unk_id use_fast vocab_file",
            ignored("tokenizer.json says how text is encoded and decoded"),
        ),
        **_each(
            "max_length model_input_names pad_to_multiple_of pad_token_type_id padding padding_side stride truncation "
            "truncation_side truncation_strategy",
            ignored("prompts are neither padded nor cut"),
        ),
        **_each("max_len max_model_input_sizes model_max_length", ignored("config.json says the longest context")),
        **_each("response_schema response_template", ignored("how to parse answers, which minisgl gives as text")),
        "use_default_system_prompt": ignored("the chat template writes the system prompt"),
        "chat_control_tokens": ignored("an option of the transformers library, off by default"),
        "processor_class": ignored("images and audio are not served"),
        **_each(
            "__version__ _commit_hash added_tokens_file backend device_map files_loaded init_inputs is_local "
            "local_files_only name_or_path special_tokens_map_file tokenizer_type transformers_version "
            "trust_remote_code verbose vocab_size",
            ignored("where the file comes from and how transformers loaded it"),
        ),
    },
)

GGUF_GATE: Final = Gate(
    "GGUF tokenizer keys",
    {
        "tokenizer.ggml.model": used("the kind of tokenizer; an unknown one serves prompts of token ids only"),
        "tokenizer.ggml.pre": used("how text is cut before BPE; an unknown way serves prompts of token ids only"),
        "tokenizer.ggml.tokens": used("the vocabulary"),
        "tokenizer.ggml.merges": used("the merges of BPE"),
        "tokenizer.ggml.token_type": used("which tokens are control tokens or defined by the user"),
        **_each(
            "tokenizer.ggml.bos_token_id tokenizer.ggml.unknown_token_id tokenizer.ggml.padding_token_id "
            "tokenizer.ggml.seperator_token_id tokenizer.ggml.cls_token_id tokenizer.ggml.mask_token_id",
            used("a special token and a variable of the chat template"),
        ),
        "tokenizer.ggml.eos_token_id": used("ends an answer; a variable of the chat template"),
        **_each("tokenizer.ggml.eot_token_id tokenizer.ggml.eom_token_id", used("ends an answer")),
        "tokenizer.ggml.add_bos_token": used("whether BOS precedes a prompt"),
        "tokenizer.ggml.add_eos_token": used("whether EOS follows a prompt"),
        "tokenizer.chat_template": used("the chat template"),
        "tokenizer.chat_template.*": used("a further chat template with a name"),
        "tokenizer.chat_templates": ignored("the keys of the templates give their names"),
        **_each(
            "tokenizer.ggml.add_space_prefix tokenizer.ggml.remove_extra_whitespaces",
            warned("byte-level BPE leaves spaces as they are", False),
        ),
        "tokenizer.ggml.add_sep_token": warned("a prompt is one text", False),
        "tokenizer.ggml.precompiled_charsmap": warned("byte-level BPE has no such table"),
        **_each("tokenizer.ggml.scores tokenizer.ggml.token_type_count", ignored("byte-level BPE does not need it")),
        **_each(
            "tokenizer.ggml.prefix_token_id tokenizer.ggml.suffix_token_id tokenizer.ggml.middle_token_id "
            "tokenizer.ggml.fim_pre_token_id tokenizer.ggml.fim_suf_token_id tokenizer.ggml.fim_mid_token_id "
            "tokenizer.ggml.fim_pad_token_id tokenizer.ggml.fim_rep_token_id tokenizer.ggml.fim_sep_token_id",
            ignored("a prompt holds the tokens around a gap itself"),
        ),
        "tokenizer.huggingface.json": ignored("the other keys say the same"),
        "tokenizer.rwkv.world": ignored("for RWKV models"),
    },
)
"""Checked for tokenizers that can be built."""
