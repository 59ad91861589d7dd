"""No metadata key of a GGUF file is accepted and ignored in silence; what is used means what transformers means."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.errors import CheckpointError
from minisgl_core.formats import GGUFFile
from minisgl_core.formats.gguf import GGUFTensor
from minisgl_core.modelconfig import ModelConfig, config_from_dict, dequantised, rope_inv_freq
from minisgl_core.modelconfig.gguf import read_gguf
from minisgl_core.modelconfig.gguf_keys import ARCHITECTURE_GATE, GENERAL_GATE
from support.input_keys import UNKNOWN, VALUES, Log
from support.model_configs import LLAMA

ARCHITECTURES = ["llama", "qwen2", "qwen3", "qwen3moe"]
_PATH = Path(__file__)


def header(arch: str, more: dict[str, Any] | None = None) -> GGUFFile:
    """A header without a file; ``more``: keys without the architecture, None removes one."""
    own = {
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "block_count": 2,
        "context_length": 4096,
        "embedding_length": 128,
        "feed_forward_length": 256,
    }
    if arch == "qwen3moe":
        own |= {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64}
    metadata = {f"{arch}.{key}": value for key, value in (own | (more or {})).items() if value is not None}
    return file_of({"general.architecture": arch, **metadata})


def file_of(metadata: dict[str, Any]) -> GGUFFile:
    file = object.__new__(GGUFFile)
    file.path, file.paths, file.metadata = _PATH, [_PATH], metadata
    file.tensors = {"token_embd.weight": GGUFTensor("token_embd.weight", (512, 128), 0, 0, _PATH)}
    return file


def names(gate: Any) -> st.SearchStrategy[str]:
    return st.one_of(st.sampled_from([key.replace("*", "zz") for key in sorted(gate.rules)]), UNKNOWN)


def check_no_silence(gate: Any, content: dict[str, Any], read: Any) -> None:
    refusal: CheckpointError | None = None
    with Log() as log:
        try:
            read()
        except CheckpointError as error:
            refusal = error
    if refusal is not None:
        assert refusal.remedy
        assert refusal.field in str(refusal)
        return
    for key, value in content.items():
        rule = gate.rule(key)
        if rule is None and value is not None:
            assert f"{key}`" in log.text
        elif rule is not None and rule.fate in ("warned", "refused"):
            assert not rule.concerns(value) or f"{key}`" in log.text


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(ARCHITECTURES), st.dictionaries(names(ARCHITECTURE_GATE), VALUES))
def test_any_key_of_the_architecture_is_used_refused_or_named(arch: str, more: dict[str, Any]) -> None:
    check_no_silence(ARCHITECTURE_GATE, more, lambda: read_gguf(header(arch, more)))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.one_of(names(GENERAL_GATE), UNKNOWN.map(lambda name: f"gemma3.{name}")), VALUES))
def test_any_other_key_is_used_refused_or_named(more: dict[str, Any]) -> None:
    more.pop("general.architecture", None)
    good = header("llama").metadata
    check_no_silence(GENERAL_GATE, more, lambda: read_gguf(file_of({**good, **more})))


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024}
CHANGES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "context_length": ("llama", {}, 100),
    "embedding_length": ("llama", {}, 256),
    "block_count": ("llama", {}, 3),
    "feed_forward_length": ("llama", {}, 64),
    "attention.head_count": ("llama", {}, 8),
    "attention.head_count_kv": ("llama", {}, 4),
    "attention.key_length": ("llama", {}, 64),
    "attention.value_length": ("llama", {}, 16),
    "attention.layer_norm_rms_epsilon": ("llama", {}, 1e-6),
    "attention.sliding_window": ("llama", {}, 8),
    "attention.scale": ("llama", {}, 0.5),
    "rope.dimension_count": ("llama", {}, 16),
    "rope.freq_base": ("llama", {}, 5e5),
    "rope.scaling.type": ("llama", YARN, "linear"),
    "rope.scaling.factor": ("llama", {}, 2.0),
    "rope.scale_linear": ("llama", {}, 2.0),
    "rope.scaling.original_context_length": ("llama", YARN, 512),
    "rope.scaling.yarn_beta_fast": ("llama", YARN, 8.0),
    "rope.scaling.yarn_beta_slow": ("llama", YARN, 2.0),
    "rope.scaling.yarn_attn_factor": ("llama", YARN, 1.5),
    "expert_count": ("qwen3moe", {}, 9),
    "expert_used_count": ("qwen3moe", {}, 3),
    "expert_feed_forward_length": ("qwen3moe", {}, 32),
    "expert_weights_norm": ("qwen3moe", {}, False),
}


def outcome(arch: str, more: dict[str, Any]) -> ModelConfig | str:
    try:
        return read_gguf(header(arch, more))
    except CheckpointError as error:
        return str(error)


def test_every_key_that_counts_as_used_changes_the_model() -> None:
    assert CHANGES.keys() == {key for key, rule in ARCHITECTURE_GATE.rules.items() if rule.fate == "used"}
    for key, (arch, base, value) in CHANGES.items():
        assert outcome(arch, {**base, key: value}) != outcome(arch, base), key


def library_keys() -> Iterator[str]:
    for group in vars(library.constants.Keys).values():
        if inspect.isclass(group):
            yield from (value for name, value in vars(group).items() if isinstance(value, str) and name[0] != "_")


def test_keys_of_the_library_that_change_answers_have_a_rule() -> None:
    """Without one: what no decoder of text has."""
    found = [key for key in library_keys() if not key.startswith("{arch}.") and GENERAL_GATE.rule(key) is None]
    assert {key.partition(".")[0] for key in found} <= {"clip", "imatrix", "diffusion", "xielu"}
    own = [key.removeprefix("{arch}.") for key in library_keys() if key.startswith("{arch}.")]
    left = {key for key in own if ARCHITECTURE_GATE.rule(key) is None}
    assert left <= {
        "features_length",
        "moe_latent_size",
        "decoder_start_token_id",
        "decoder_block_count",
        "rescale_every_n_layers",
        "time_mix_extra_dim",
        "time_decay_extra_dim",
        "token_shift_count",
        "{dense}_feat_in",
        "{dense}_feat_out",
        *(key for key in left if key.startswith(("posnet", "convnext", "classifier"))),
    }


@pytest.mark.parametrize("key", ["yarn_beta_fast", "yarn_beta_slow", "yarn_attn_factor", "yarn_ext_factor"])
@pytest.mark.parametrize("kind", ["none", "linear"])
def test_yarns_settings_on_another_kind_are_named(kind: str, key: str) -> None:
    more = {"rope.scaling.type": kind, "rope.scaling.factor": 2.0, f"rope.scaling.{key}": 8.0}
    with Log() as log:
        read_gguf(header("qwen3", more))
    assert f"`qwen3.rope.scaling.{key}` = 8.0 not applied: rope of kind {kind!r} has no such setting" in log.text
    assert ("scaling.factor`" in log.text) == (kind == "none")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("rope.scaling.attn_factor", 1.2),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.scaling.alpha", 1000.0),
        ("rope.dimension_sections", [16, 24, 24, 0]),
        ("rope.freq_base_swa", 10000.0),
        ("logit_scale", 0.0625),
        ("embedding_scale", 12.0),
        ("residual_scale", 0.22),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("attention.scale", 0.015),
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("attention.value_length", 64),
        ("attention.sliding_window_pattern", 6),
        ("expert_gating_func", 2),
        ("expert_shared_count", 1),
        ("expert_weights_scale", 2.5),
        ("use_parallel_residual", True),
    ],
)
def test_what_would_change_answers_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_gguf(header("qwen3moe", {**YARN, key: value}))
    assert caught.value.field == f"qwen3moe.{key}"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}),
        (
            {
                **YARN,
                "rope.scaling.yarn_beta_fast": 8.0,
                "rope.scaling.yarn_beta_slow": 2.0,
                "rope.scaling.yarn_attn_factor": 1.25,
                "rope.scaling.yarn_ext_factor": 1.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
                "attention_factor": 1.25,
            },
        ),
    ],
)
def test_rope_equals_transformers(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    shape = {key: value for key, value in LLAMA.items() if key not in ("architectures", "model_type", "rope_theta")}
    parameters = {**theirs, "rope_theta": 10_000.0}
    config = LlamaConfig(**shape, head_dim=32, max_position_embeddings=4096, rope_parameters=dict(parameters))
    reference = LlamaRotaryEmbedding(config)
    frequencies, factor = rope_inv_freq(read_gguf(header("llama", ours)).rope, 4096)
    torch.testing.assert_close(torch.from_numpy(frequencies), reference.inv_freq, rtol=3e-7, atol=0.0)
    assert factor == pytest.approx(reference.attention_scaling, rel=1e-6)
    folder = config_from_dict({**LLAMA, "head_dim": 32, "max_position_embeddings": 4096, "rope_parameters": parameters})
    np.testing.assert_array_equal(frequencies, rope_inv_freq(folder.rope, 4096)[0])


def test_all_ends_that_the_file_names_end_an_answer() -> None:
    ends = {f"tokenizer.ggml.{name}_token_id": number for name, number in (("eos", 1), ("eot", 2), ("eom", 3))}
    assert read_gguf(file_of({**header("llama").metadata, **ends})).eos_token_ids == (1, 2, 3)


def test_recommended_sampling_is_named() -> None:
    with Log() as log:
        read_gguf(file_of({**header("qwen3").metadata, "general.sampling.temp": 0.6, "general.name": "x"}))
    assert "`general.sampling.temp` = 0.6 not applied: minisgl takes sampling parameters" in log.text


def test_tiny_files_are_read_without_a_word(tiny: Any) -> None:
    with Log() as log:
        for name in ("s93-gguf", "moe-gguf"):
            read_gguf(GGUFFile(tiny(name) / "model.gguf"))
    assert log.text == ""


def test_dequantising_in_words() -> None:
    file = header("llama")
    file.tensors["blk.0.attn_q.weight"] = GGUFTensor("blk.0.attn_q.weight", (128, 128), 3, 0, _PATH)
    model = read_gguf(file)
    text = f"the file's quantised weights ({file.num_bytes / 1e6:.0f} MB) are dequantised when they are loaded:"
    assert dequantised(model, "float32", 538_000_000) == f"{text} 538 MB of float32"
    assert dequantised(model, "bfloat16").endswith("MB of bfloat16")
    assert dequantised(read_gguf(header("llama")), "float32") == ""
