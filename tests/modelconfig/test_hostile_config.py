"""Whatever a config.json or a GGUF header holds, reading it ends in a model or in an error for people."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.errors import CheckpointError, MinisglError
from minisgl_core.formats import GGUFFile
from minisgl_core.formats.gguf import GGUFTensor
from minisgl_core.modelconfig import ModelConfig, config_from_dict, read_model_config, rope_inv_freq
from minisgl_core.modelconfig.gguf import read_gguf
from support.model_configs import LLAMA, MISTRAL, QWEN2, QWEN2_MOE, QWEN3_MOE, family

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "attention_factor": 1.5,
    "truncate": False,
}
GOOD: list[dict[str, Any]] = [
    {**LLAMA, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "attention_bias": True, "mlp_bias": False},
    {**LLAMA, "rope_parameters": {**YARN, "rope_theta": 1e6}, "torch_dtype": "bfloat16"},
    {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 4096, "head_dim": 32},
    {**MISTRAL, "sliding_window": 8, "layer_types": ["sliding_attention"] * 4, "eos_token_id": [2, 7]},
    {**QWEN2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "tie_word_embeddings": True},
    {**QWEN2_MOE, "shared_expert_intermediate_size": 96, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
    {**QWEN3_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": True, "bos_token_id": 1},
    family("mine", "MineForCausalLM", partial_rotary_factor=0.5, dtype="float16", quantization_config=None),
]
SCALARS = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            False,
            0,
            1,
            2,
            3,
            -1,
            31,
            10**9,
            2**31,
            2**63,
            10**30,
            10**400,
            "",
            "llama",
            "4",
            "foo",
            "dynamic",
        ]
    ),
    st.sampled_from([0.0, -0.0, 0.5, 1.0, 4.0, -3.5, 1e-320, 1e-7, 1e7, 1e39, 1e308, float("inf"), float("nan")]),
    st.integers(-5, 5000),
    st.floats(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.sampled_from(["rope_type", "factor", "full_attention", "x"]), inner, max_size=3),
    ),
    max_leaves=6,
)


@st.composite
def changed(draw: st.DrawFn, good: list[dict[str, Any]]) -> dict[str, Any]:
    """One of the good ones, in which a few values are others, or gone."""
    content = copy.deepcopy(draw(st.sampled_from(good)))
    inner = [value for value in content.values() if isinstance(value, dict)]
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from([content, *inner, *inner]))
        key = draw(st.sampled_from(sorted(place)))
        if draw(st.booleans()) or draw(st.booleans()):
            place[key] = draw(VALUES)
        else:
            del place[key]
        if not place:
            break
    return content


def check(config: ModelConfig) -> None:
    """It can be computed with: rope is where numbers meet first."""
    assert len(config.windows) == config.num_layers
    if config.rope.rotary_dim > 1 << 16:
        return
    for length in (2, config.max_position_embeddings, 4 * config.max_position_embeddings):
        frequencies, scale = rope_inv_freq(config.rope, length)
        assert frequencies.shape == (config.rope.rotary_dim // 2,)
        assert np.isfinite(frequencies).all() and (frequencies >= 0).all()
        assert 0 < scale < 1e9


def check_reading(read: Callable[[], ModelConfig]) -> None:
    refused: MinisglError | None = None
    try:
        check(read())
    except MinisglError as error:
        refused = error
    if refused is not None:
        assert refused.field and refused.remedy
        assert "\n" not in str(refused) and len(str(refused)) < 400


@settings(max_examples=600, deadline=None)
@given(changed(GOOD))
def test_any_config_is_a_model_or_an_error_for_people(content: dict[str, Any]) -> None:
    check_reading(lambda: config_from_dict(content, {"eos_token_id": content.get("eos_token_id")}))


def test_the_good_ones_are_models() -> None:
    for content in GOOD:
        check(config_from_dict(content))


GGUF_GOOD: list[dict[str, Any]] = [
    {
        "general.architecture": arch,
        "general.file_type": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": [2, 2],
        f"{arch}.attention.key_length": 32,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.attention.sliding_window": 8,
        f"{arch}.block_count": 2,
        f"{arch}.context_length": 4096,
        f"{arch}.embedding_length": 128,
        f"{arch}.feed_forward_length": 256,
        f"{arch}.rope.dimension_count": 32,
        f"{arch}.rope.freq_base": 1e6,
        f"{arch}.rope.scaling.type": "yarn",
        f"{arch}.rope.scaling.factor": 4.0,
        f"{arch}.rope.scaling.attn_factor": 1.0,
        f"{arch}.rope.scaling.original_context_length": 1024,
        f"{arch}.expert_count": 8 if arch == "qwen3moe" else 0,
        f"{arch}.expert_used_count": 2,
        f"{arch}.expert_feed_forward_length": 64,
    }
    for arch in ("llama", "qwen3moe")
]


def gguf(metadata: dict[str, Any], *shape: int) -> GGUFFile:
    """A header without a file."""
    file = object.__new__(GGUFFile)
    file.path, file.paths, file.metadata = Path(__file__), [Path(__file__)], metadata
    file.tensors = {"token_embd.weight": GGUFTensor("token_embd.weight", shape, 0, 0, file.path)}
    return file


@settings(max_examples=300, deadline=None)
@given(changed(GGUF_GOOD), st.sampled_from([(512, 128), (512,), (), (0, 128)]))
def test_any_gguf_header_is_a_model_or_an_error_for_people(metadata: dict[str, Any], shape: tuple[int, ...]) -> None:
    check_reading(lambda: read_gguf(gguf(metadata, *shape)))


def test_the_good_headers_are_models() -> None:
    for metadata in GGUF_GOOD:
        check(read_gguf(gguf(metadata, 512, 128)))


@pytest.mark.parametrize(("tensor_type", "on_gpu"), [(0, "float32"), (3, "bfloat16")])
def test_a_quantised_file_is_computed_in_what_the_device_is_good_at(tensor_type: int, on_gpu: str) -> None:
    file = gguf(GGUF_GOOD[0] | {"general.file_type": tensor_type}, 512, 128)
    file.tensors["blk.0.attn_q.weight"] = GGUFTensor("blk.0.attn_q.weight", (128, 128), tensor_type, 0, file.path)
    model = read_gguf(file)
    assert (model.dtype_on("cpu"), model.dtype_on("cuda")) == ("float32", on_gpu)


@pytest.mark.parametrize("numbers", [(1.0, 0.0), (1.0, float("nan")), (1.0,)])
def test_divisors_that_make_no_frequencies(numbers: tuple[float, ...], tmp_path: Path) -> None:
    file = gguf(dict(GGUF_GOOD[0]), 512, 128)
    file.path = tmp_path / "model.gguf"
    file.path.write_bytes(struct.pack(f"<{len(numbers)}f", *numbers))
    file.tensors["rope_freqs.weight"] = GGUFTensor("rope_freqs.weight", (2,), 0, 0, file.path)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        read_gguf(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": ["llama"]}, r"`model_type` .* is \['llama'\]; it must be a text"),
        ({"architectures": "LlamaForCausalLM"}, "`architectures` .* is 'LlamaForCausalLM'; it must be a list"),
        ({"rope_scaling": {**YARN, "rope_theta": 1}}, "`rope_theta` .* is 1; it must be a number from 2 to"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
            "`low_freq_factor` .* is 4; it must be below high_freq_factor, which is 4",
        ),
        ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, "`beta_fast` .* is 0.5; it must be at least beta_slow"),
        ({"rope_scaling": {**YARN, "mscale": "much"}}, "`mscale` .* is 'much'; it must be a number"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "`rope_type` .* 2 dimensions"),
        ({"layer_types": ["foo"] * 4}, r"`layer_types` .*'foo'.*; it must list 4 of 'full_attention' or"),
        ({"head_dim": 31}, "`head_dim` .* is 31; it must be even"),
        ({"hidden_size": 124}, "`head_dim` .* would be 124 / 4 = 31; it must be even"),
        ({"num_hidden_layers": 10**12}, "`num_hidden_layers` .* is 1000000000000; .* at most 10000"),
        ({"vocab_size": 10**30}, "`vocab_size` .*; it must be an integer of at most 9223372036854775807"),
        ({"rms_norm_eps": 10**400}, "`rms_norm_eps` .*; it must be a number from 1e-30 to 1"),
        ({"torch_dtype": 16}, "`torch_dtype` .* is 16; it must be a text"),
    ],
)
def test_the_key_at_fault_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_from_dict({**LLAMA, **change})


def test_layers_that_are_dense_must_be_a_list() -> None:
    with pytest.raises(CheckpointError, match=r"`mlp_only_layers` .* is 5; it must be a list of integers"):
        config_from_dict({**QWEN3_MOE, "mlp_only_layers": 5})


def test_token_ids_below_zero_mean_none() -> None:
    config = config_from_dict({**LLAMA, "eos_token_id": [-1, 7], "bos_token_id": -1}, {"eos_token_id": -1})
    assert (config.eos_token_ids, config.bos_token_id) == ((7,), None)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}", b"\xff\xfe{}"])
def test_json_that_python_cannot_hold(text: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=r"config\.json' cannot be read"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    "header", [[], 5, {"a": 5}, {"a": {"dtype": ["F16"]}}, {"a": {}}, {"a": {"dtype": "I64"}}, "cut", "huge", "deep"]
)
def test_weights_whose_header_has_no_dtype(header: Any, tmp_path: Path) -> None:
    """The dtype is then float32; the fault of the file is reported when it is read."""
    text = {"cut": b"{", "huge": b"{}", "deep": b"[" * 100_000}.get(header) if isinstance(header, str) else None
    text = json.dumps(header).encode() if text is None else text
    length = 2**63 if header == "huge" else len(text)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + text)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_model_config(tmp_path).dtype == "float32"
