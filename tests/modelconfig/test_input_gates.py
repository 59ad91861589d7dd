"""No key of config.json, of its rope settings or of generation_config.json is accepted and ignored in silence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.errors import CheckpointError, ConfigError
from minisgl_core.inputs import Gate, ignored, refused, used, warned
from minisgl_core.modelconfig import config_from_dict, read_model_config
from minisgl_core.modelconfig.hf_keys import CONFIG_GATE, GENERATION_GATE, ROPE_GATE
from support.input_keys import UNKNOWN, VALUES, Log
from support.model_configs import LLAMA, MISTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, family, without

FAMILIES = [LLAMA, MISTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE]


def check_no_silence(gate: Gate, content: dict[str, Any], read: Any) -> None:
    """``read()`` used each key, or it was ignored as harmless, named in an error, or named in the log."""
    refusal: CheckpointError | None = None
    with Log() as log:
        try:
            read()
        except CheckpointError as error:
            refusal = error
    if refusal is not None:
        assert refusal.field and refusal.remedy
        assert refusal.field in str(refusal)
        return
    for key, value in content.items():
        rule = gate.rule(key)
        if rule is None and value is None:
            continue
        if rule is None or (rule.fate == "warned" and rule.concerns(value)):
            assert f"`{key}`" in log.text
        else:
            assert rule.fate in ("used", "ignored") or not rule.concerns(value)


GATE = Gate(
    "planted",
    {
        "a": used("something"),
        "b": ignored("harmless"),
        "c": warned("not applied here", 1, False),
        "d": refused("it is wrong", "remove it", 0),
        "general.*": ignored("words"),
        "general.type": refused("no model", "another", "model"),
    },
)


@pytest.mark.parametrize(
    "content", [{"a": 5, "b": object()}, {"c": 1.0}, {"c": False}, {"c": None, "d": None}, {"d": 0}]
)
def test_a_gate_lets_pass_what_changes_nothing(content: dict[str, Any]) -> None:
    with Log() as log:
        GATE.check(content, "f")
    assert log.text == ""


@pytest.mark.parametrize("value", [2, 0, True, "1", [1]])
def test_a_gate_warns_once_by_name(value: object) -> None:
    with Log() as log:
        GATE.check({"c": value, "zz": 1, "yy": 2}, "f")
        GATE.check({"c": value, "zz": 1, "yy": 2}, "f")
    assert log.text.count("\n") == 2
    assert f"'f': `c` = {value!r} not applied: not applied here\n" in log.text
    assert "'f' has keys that minisgl does not know and ignores: `yy`, `zz`\n" in log.text


def test_a_gate_refuses_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"`d` in 'f' is 0\.5: it is wrong; remove it"):
        GATE.check({"d": 0.5}, "f")
    with pytest.raises(CheckpointError, match=r"`general\.type` in 'f' is 'adapter'"):
        GATE.check({"general.name": "x", "general.type": "adapter"}, "f")
    strict = Gate("strict", {"page_size": used("pages")}, unknown="refused", error=ConfigError)
    with pytest.raises(ConfigError, match=r"unknown key `page_sise` in 'f'; did you mean 'page_size'\?"):
        strict.check({"page_sise": 1}, "f")


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(FAMILIES), st.dictionaries(st.one_of(st.sampled_from(sorted(CONFIG_GATE.rules)), UNKNOWN), VALUES)
)
def test_any_key_of_a_config_is_used_refused_or_named(base: dict[str, Any], more: dict[str, Any]) -> None:
    check_no_silence(CONFIG_GATE, more, lambda: config_from_dict({**base, **more}))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]),
    st.dictionaries(st.one_of(st.sampled_from(sorted(ROPE_GATE.rules)), UNKNOWN), VALUES),
)
def test_any_rope_setting_is_used_refused_or_named(kind: str, more: dict[str, Any]) -> None:
    good = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    check_no_silence(ROPE_GATE, more, lambda: config_from_dict({**LLAMA, "rope_parameters": {**good, **more}}))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.one_of(st.sampled_from(sorted(GENERATION_GATE.rules)), UNKNOWN), VALUES))
def test_any_generation_setting_is_used_refused_or_named(
    tmp_path_factory: pytest.TempPathFactory, more: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "generation_config.json").write_text(json.dumps(more))
    check_no_silence(GENERATION_GATE, more, lambda: read_model_config(folder))


CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "architectures": (LLAMA, ["MyForCausalLM"]),
    "model_type": (LLAMA, "qwen3"),
    "vocab_size": (LLAMA, 600),
    "hidden_size": (LLAMA, 256),
    "num_hidden_layers": (LLAMA, 5),
    "num_attention_heads": (LLAMA, 8),
    "num_key_value_heads": (LLAMA, 4),
    "head_dim": (LLAMA, 64),
    "intermediate_size": (LLAMA, 128),
    "hidden_act": (LLAMA, "gelu"),
    "rms_norm_eps": (LLAMA, 1e-5),
    "max_position_embeddings": (LLAMA, 100),
    "original_max_position_embeddings": ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 100),
    "rope_theta": (LLAMA, 5e5),
    "rope_scaling": (LLAMA, {"type": "linear", "factor": 2.0}),
    "rope_parameters": (LLAMA, {"rope_type": "linear", "factor": 2.0}),
    "partial_rotary_factor": (LLAMA, 0.5),
    "tie_word_embeddings": (LLAMA, True),
    "dtype": (LLAMA, "float16"),
    "torch_dtype": (LLAMA, "float16"),
    "eos_token_id": (LLAMA, 9),
    "bos_token_id": (LLAMA, 9),
    "quantization_config": (LLAMA, {"bits": 4}),
    "quantization": (LLAMA, {"bits": 4}),
    "attention_bias": (LLAMA, True),
    "mlp_bias": (LLAMA, True),
    "qkv_bias": (QWEN2_MOE, False),
    "sliding_window": (MISTRAL, 8),
    "use_sliding_window": ({**QWEN2, "max_window_layers": 1}, True),
    "max_window_layers": ({**QWEN2, "use_sliding_window": True}, 1),
    "layer_types": ({**QWEN2, "use_sliding_window": True}, ["sliding_attention"] * 4),
    "num_experts": (QWEN3_MOE, 9),
    "num_local_experts": (without(QWEN3_MOE, "num_experts"), 9),
    "num_experts_per_tok": (QWEN3_MOE, 3),
    "moe_intermediate_size": (QWEN3_MOE, 32),
    "norm_topk_prob": (QWEN3_MOE, True),
    "decoder_sparse_step": (QWEN3_MOE, 2),
    "mlp_only_layers": (QWEN3_MOE, [1]),
    "shared_expert_intermediate_size": (QWEN2_MOE, 96),
}


def outcome(content: dict[str, Any], generation: dict[str, Any] | None = None) -> object:
    try:
        return config_from_dict(content, generation)
    except CheckpointError as error:
        return str(error)


def test_every_key_that_counts_as_used_changes_the_model() -> None:
    assert CHANGES.keys() == {key for key, rule in CONFIG_GATE.rules.items() if rule.fate == "used"}
    for key, (base, value) in CHANGES.items():
        assert outcome({**base, key: value}) != outcome(base), key


def test_keys_of_other_families_are_named() -> None:
    """The same keys, where the family does not read them."""
    others = {key: value for key, (base, value) in CHANGES.items() if base is not LLAMA and key != "layer_types"}
    del others["original_max_position_embeddings"]
    others["qkv_bias"] = True
    for key, value in others.items():
        with Log() as log:
            config_from_dict({**LLAMA, key: value})
        assert f"`{key}` = {value!r} not applied: llama models have no such setting" in log.text
    for base, key, value in ((MISTRAL, "attention_bias", True), (MISTRAL, "use_sliding_window", False)):
        with Log() as log:
            config_from_dict({**base, key: value})
        assert f"`{key}`" in log.text


ROPE_CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "rope_type": ({"factor": 2.0}, "linear"),
    "type": ({"factor": 2.0}, "linear"),
    "rope_theta": ({}, 5e5),
    "partial_rotary_factor": ({}, 0.5),
    "factor": ({"rope_type": "linear", "factor": 2.0}, 3.0),
    "original_max_position_embeddings": ({"rope_type": "yarn", "factor": 2.0}, 100),
    **{
        key: ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 2.0)
        for key in ("low_freq_factor", "high_freq_factor")
    },
    **{
        key: ({"rope_type": "yarn", "factor": 4.0, "mscale": 0.5, "mscale_all_dim": 0.5}, value)
        for key, value in {
            "beta_fast": 16,
            "beta_slow": 2,
            "attention_factor": 1.5,
            "mscale": 2.0,
            "mscale_all_dim": 2.0,
            "truncate": False,
        }.items()
    },
}


def test_every_rope_setting_that_counts_as_used_changes_the_rope() -> None:
    assert ROPE_CHANGES.keys() == {key for key, rule in ROPE_GATE.rules.items() if rule.fate == "used"}
    for key, (base, value) in ROPE_CHANGES.items():
        one, other = (
            outcome({**LLAMA, "rope_theta": 1e4, "rope_parameters": rope}) for rope in (base, {**base, key: value})
        )
        assert one != other, key


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3"])
def test_settings_of_another_rope_kind_are_named(kind: str) -> None:
    good = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 16}
    with Log() as log:
        config_from_dict({**LLAMA, "rope_parameters": good})
    assert f"`beta_fast` = 16 not applied: rope of kind {kind!r} has no such setting" in log.text
    assert ("`factor`" in log.text) == (kind == "default")
    assert ("`low_freq_factor`" in log.text) == (kind != "llama3")


def test_two_rope_dicts_must_agree() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    with pytest.raises(CheckpointError, match=r"`rope_scaling` .* and `rope_parameters` disagree about `rope_type`"):
        config_from_dict({**LLAMA, "rope_parameters": yarn, "rope_scaling": {"rope_type": "default"}})
    both = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": {**yarn}}
    assert config_from_dict(both).rope.kind == "yarn"


def transformers_keys(model_type: str) -> Iterator[str]:
    from transformers import AutoConfig

    yield from AutoConfig.for_model(model_type).to_dict()


@pytest.mark.parametrize("base", FAMILIES, ids=lambda base: base["model_type"])
def test_what_transformers_writes_is_known(base: dict[str, Any]) -> None:
    assert [key for key in transformers_keys(base["model_type"]) if CONFIG_GATE.rule(key) is None] == []


def test_what_transformers_writes_for_generation_is_known() -> None:
    from transformers import GenerationConfig

    assert [key for key in GenerationConfig().to_dict() if GENERATION_GATE.rule(key) is None] == []


def test_tiny_checkpoints_are_read_without_a_word(tiny: Any) -> None:
    with Log() as log:
        for name in ("s93", "q25", "q3", "moe", "moe2", "q3-v4", "moe-v4", "llama-yarn", "mistral-window"):
            read_model_config(tiny(name))
    assert log.text == ""


def test_recommended_sampling_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    content = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [7, 9]}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with Log() as log:
        assert read_model_config(tmp_path).eos_token_ids == (7, 9)
        read_model_config(tmp_path)
    (line,) = log.text.splitlines()
    assert "`temperature` = 0.6, `top_k` = 20, `top_p` = 0.95 not applied: minisgl takes sampling parameters" in line


def test_a_default_end_is_not_added_to_a_named_one() -> None:
    """Llama's default, 2, is an ordinary token of newer vocabularies."""
    assert config_from_dict(LLAMA).eos_token_ids == (2,)
    assert config_from_dict(LLAMA, {"eos_token_id": [70, 71]}).eos_token_ids == (70, 71)
    assert config_from_dict(LLAMA, {"bos_token_id": 69}).bos_token_id == 69
    assert config_from_dict({**LLAMA, "bos_token_id": 5}, {"bos_token_id": 69}).bos_token_id == 5
    assert config_from_dict({**LLAMA, "eos_token_id": 5}, {"eos_token_id": [70]}).eos_token_ids == (5, 70)


def test_a_family_of_a_plugin_may_have_any_key() -> None:
    with Log() as log:
        config_from_dict(family("mine", "MineForCausalLM", my_key=3, final_logit_softcapping=30.0))
    assert log.text == ""
