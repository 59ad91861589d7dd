from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.errors import CheckpointError, UsageError
from minisgl_core.modelconfig import MoEConfig, config_from_dict, read_model_config
from support.model_configs import LLAMA, MISTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, family, without


def write(folder: Path, config: Any, generation: Any = None) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


# --- against transformers --------------------------------------------------------------------------------------------

SAVED = [
    "s93",
    "q25",
    "q3",
    "moe",
    "moe2",
    "moe-mixed",
    "mistral-window",
    "mistral-full",
    "qwen2-window",
    "llama-bias",
    "llama-llama3",
    "llama-yarn",
    "q3-8q1kv",
    "q3-bf16",
    "moe-v4",
]


@pytest.mark.parametrize("name", SAVED)
def test_same_facts_as_transformers(name: str, tiny: Any) -> None:
    from transformers import AutoConfig

    config, theirs = read_model_config(tiny(name)), AutoConfig.from_pretrained(tiny(name))
    assert config.architecture == theirs.architectures[0]
    for ours, their_name in [
        (config.vocab_size, "vocab_size"),
        (config.hidden_size, "hidden_size"),
        (config.num_layers, "num_hidden_layers"),
        (config.num_q_heads, "num_attention_heads"),
        (config.num_kv_heads, "num_key_value_heads"),
        (config.head_dim, "head_dim"),
        (config.intermediate_size, "intermediate_size"),
        (config.rms_norm_eps, "rms_norm_eps"),
        (config.max_position_embeddings, "max_position_embeddings"),
        (config.tie_word_embeddings, "tie_word_embeddings"),
        (config.hidden_act, "hidden_act"),
    ]:
        assert ours == getattr(theirs, their_name), their_name
    assert config.dtype == str(theirs.dtype).removeprefix("torch.")
    assert config.eos_token_ids == (theirs.eos_token_id,)
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.rope.kind == theirs.rope_parameters["rope_type"]


def test_names_of_biases_and_norms_are_in_the_checkpoint(tiny: Any) -> None:
    """What the config says of each family must be what transformers wrote."""
    from minisgl_core.checkpoint import open_source

    for name in ("s93", "q25", "q3", "moe2", "llama-bias", "mistral-full"):
        config, names = read_model_config(tiny(name)), open_source(tiny(name)).names()
        attention = "model.layers.0.self_attn."
        assert config.qkv_bias == (f"{attention}q_proj.bias" in names), name
        assert config.o_bias == (f"{attention}o_proj.bias" in names), name
        assert config.mlp_bias == ("model.layers.0.mlp.gate_proj.bias" in names), name
        assert config.qk_norm == (f"{attention}q_norm.weight" in names), name


@pytest.mark.parametrize("name", ["q3", "moe"])
def test_both_spellings_mean_the_same(name: str, tiny: Any) -> None:
    assert read_model_config(tiny(f"{name}-v4")) == read_model_config(tiny(name))


@pytest.mark.parametrize("name", ["s93", "moe"])
def test_gguf_means_the_same(name: str, tiny: Any) -> None:
    folder, gguf = read_model_config(tiny(name)), read_model_config(tiny(f"{name}-gguf"))
    assert gguf.rope == folder.rope
    for field in ("architecture", "vocab_size", "hidden_size", "num_layers", "num_q_heads", "num_kv_heads", "head_dim",
                  "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "dtype", "qkv_bias", "o_bias",
                  "mlp_bias", "qk_norm", "windows", "moe", "eos_token_ids"):  # fmt: skip
        assert getattr(gguf, field) == getattr(folder, field), field


# --- defaults --------------------------------------------------------------------------------------------------------


def test_missing_head_dim() -> None:
    assert config_from_dict(LLAMA).head_dim == 32
    assert config_from_dict(QWEN3).head_dim == 128
    assert config_from_dict(QWEN3_MOE).head_dim == 32
    assert config_from_dict({**QWEN2, "head_dim": None}).head_dim == 32


def test_missing_kv_heads() -> None:
    assert config_from_dict(without(LLAMA, "num_key_value_heads")).num_kv_heads == 4
    wide = {**QWEN3_MOE, "num_attention_heads": 16}
    assert config_from_dict(without(wide, "num_key_value_heads")).num_kv_heads == 4
    assert config_from_dict({**wide, "num_key_value_heads": None}).num_kv_heads == 16


def test_biases_of_each_family() -> None:
    biases = [
        (LLAMA, (False, False, False)),
        ({**LLAMA, "attention_bias": True}, (True, True, False)),
        ({**LLAMA, "mlp_bias": True}, (False, False, True)),
        (QWEN2, (True, False, False)),
        ({**QWEN2, "attention_bias": False}, (True, False, False)),
        (QWEN2_MOE, (True, False, False)),
        ({**QWEN2_MOE, "qkv_bias": False}, (False, False, False)),
        ({**QWEN3, "attention_bias": True}, (True, True, False)),
        ({**MISTRAL, "attention_bias": True}, (False, False, False)),
    ]
    for content, expected in biases:
        config = config_from_dict(content)
        assert (config.qkv_bias, config.o_bias, config.mlp_bias) == expected, content


def test_architecture_from_model_type_and_back() -> None:
    assert config_from_dict(without(QWEN3, "architectures")).architecture == "Qwen3ForCausalLM"
    assert config_from_dict(without(QWEN3, "model_type")).model_type == "qwen3"


def test_a_plugins_family_is_read_by_the_usual_keys() -> None:
    config = config_from_dict(family("mine", "MineForCausalLM", my_key=3))
    assert (config.architecture, config.head_dim, config.raw["my_key"]) == ("MineForCausalLM", 32, 3)


# --- sliding window --------------------------------------------------------------------------------------------------

FULL = (None, None, None, None)


@pytest.mark.parametrize(
    ("content", "windows"),
    [
        ({**MISTRAL, "sliding_window": 8}, (8, 8, 8, 8)),
        ({**MISTRAL, "sliding_window": None}, FULL),
        (MISTRAL, (4096,) * 4),
        ({**MISTRAL, "sliding_window": 8, "layer_types": ["full_attention"] * 4}, FULL),
        ({**LLAMA, "sliding_window": 8}, FULL),
        ({**QWEN2, "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}, FULL),
        ({**QWEN2, "sliding_window": 8, "max_window_layers": 1}, FULL),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8, 8, 8)),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}, FULL),
        (
            {
                **QWEN3,
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
        ({**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 8}, (8, 8, 8, 8)),
        ({**QWEN2_MOE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (8, None, 8, None)),
    ],
)
def test_case_16_windows(content: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert config_from_dict(content).windows == windows


# --- experts ---------------------------------------------------------------------------------------------------------


def test_both_spellings_of_the_expert_count() -> None:
    renamed = {**without(QWEN3_MOE, "num_experts"), "num_local_experts": 8}
    assert config_from_dict(renamed).moe == config_from_dict(QWEN3_MOE).moe == MoEConfig(8, 2, 64, False, (0, 1, 2, 3))


def test_which_layers_are_sparse() -> None:
    config = config_from_dict({**QWEN3_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert config.moe is not None
    assert config.moe.layers == (1,)
    assert config_from_dict({**QWEN3_MOE, "mlp_only_layers": [0, 1, 2, 3]}).moe is None


def test_shared_expert_width() -> None:
    moe = config_from_dict({**QWEN2_MOE, "shared_expert_intermediate_size": 96}).moe
    assert moe is not None
    assert moe.shared_intermediate_size == 96


# --- eos and dtype ---------------------------------------------------------------------------------------------------


def test_case_47_eos_is_the_union(tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, "eos_token_id": 9}, {"eos_token_id": [2, 7, 9]})
    assert read_model_config(tmp_path).eos_token_ids == (9, 2, 7)


def test_eos_left_out_and_null() -> None:
    assert config_from_dict(LLAMA).eos_token_ids == (2,)
    assert config_from_dict({**LLAMA, "eos_token_id": None}).eos_token_ids == ()
    assert config_from_dict(QWEN3).eos_token_ids == ()
    assert config_from_dict({**QWEN3, "bos_token_id": None}).bos_token_id is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_case_83_dtype_under_either_key(key: str, dtype: str) -> None:
    assert config_from_dict({**LLAMA, key: dtype}).dtype == dtype


@pytest.mark.parametrize(("stored", "dtype"), [("F32", "float32"), ("BF16", "bfloat16"), ("F16", "float16")])
def test_case_83_dtype_left_out_is_that_of_the_weights(tmp_path: Path, stored: str, dtype: str) -> None:
    header = json.dumps({"__metadata__": {}, "a": {"dtype": "I64"}, "b": {"dtype": stored}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert read_model_config(write(tmp_path, LLAMA)).dtype == dtype


def test_dtype_left_out_without_weights() -> None:
    assert config_from_dict(LLAMA).dtype == "float32"


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "`hidden_act`.*'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "`rope_type`.*'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "`factor`.*is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "`factor`.*'4'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "`low_freq_factor`.*is missing"),
        ({"rope_scaling": [4]}, "`rope_scaling`"),
        ({"quantization_config": {"quant_method": "gptq"}}, "`quantization_config`"),
        ({"torch_dtype": "float8_e4m3fn"}, "`dtype`.*float8"),
        ({"num_key_value_heads": 3}, "`num_key_value_heads`.*is 3.*4 query heads"),
        ({"hidden_size": 0}, "`hidden_size`.*is 0"),
        ({"hidden_size": "128"}, "`hidden_size`.*'128'"),
        ({"hidden_size": 130}, "`head_dim`.*130.*4 attention heads"),
        ({"vocab_size": None}, "`vocab_size`.*is missing"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps`.*nan"),
        ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings`.*'yes'"),
        ({"eos_token_id": ["2"]}, "`eos_token_id`"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "hidden_size": None}, "GPT2LMHeadModel"),
    ],
)
def test_refused_with_the_key_and_its_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        config_from_dict({**LLAMA, **change})
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def test_refuses_layer_types_it_does_not_know() -> None:
    content = {**MISTRAL, "layer_types": ["full_attention", "linear_attention"] * 2}
    with pytest.raises(CheckpointError, match="linear_attention"):
        config_from_dict(content)


def test_refuses_more_experts_per_token_than_experts() -> None:
    with pytest.raises(CheckpointError, match=r"`num_experts_per_tok`.*is 9.*8 experts"):
        config_from_dict({**QWEN3_MOE, "num_experts_per_tok": 9})


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no model folder or file at '.*gone'") as caught:
        read_model_config(tmp_path / "gone")
    assert caught.value.exit_code == 2


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json") as caught:
        read_model_config(tmp_path)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "line 1, column 2"), ("[1]", "holds a list"), ("", "is empty: a download that never began")],
)
def test_bad_json(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_model_config(write(tmp_path, text))


def test_two_gguf_files(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"2 GGUF models: a\.gguf, b\.gguf"):
        read_model_config(tmp_path)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    other = tmp_path / "model.bin"
    other.write_bytes(b"weights")
    with pytest.raises(UsageError, match="is not a GGUF file"):
        read_model_config(other)


def test_imports_neither_torch_nor_transformers() -> None:
    heavy = ("torch", "transformers", "gguf")
    code = f"import sys, minisgl_core.modelconfig; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
