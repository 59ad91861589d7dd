from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from minisgl_core.errors import CheckpointError
from minisgl_core.modelconfig import RopeConfig, config_from_dict, rope_inv_freq

LLAMA3 = RopeConfig(
    theta=5e5,
    rotary_dim=128,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)


def ratio(rope: RopeConfig) -> np.ndarray:
    """Scaled frequencies over unscaled ones."""
    return rope_inv_freq(rope, 128)[0] / rope_inv_freq(replace(rope, kind="default"), 128)[0]


def test_case_09_the_last_frequency() -> None:
    inv_freq, factor = rope_inv_freq(RopeConfig(theta=1e6, rotary_dim=128), 128)
    assert inv_freq.dtype == np.float32
    assert len(inv_freq) == 64
    assert inv_freq[0] == 1.0
    assert inv_freq[63] == pytest.approx(1.2409e-6, rel=1e-4)
    assert factor == 1.0


def test_case_11_linear_divides_every_frequency() -> None:
    linear = RopeConfig(theta=1e4, rotary_dim=64, kind="linear", factor=4.0)
    np.testing.assert_array_equal(ratio(linear), np.full(32, 0.25, np.float32))


def test_case_12_llama3_ratios() -> None:
    expected = {0: 1.0, 28: 1.0, 29: 0.828168, 30: 0.643743, 32: 0.371122, 34: 0.190211, 35: 0.125, 63: 0.125}
    found = ratio(LLAMA3)
    for index, value in expected.items():
        assert found[index] == pytest.approx(value, abs=2e-6), index
    small = ratio(replace(LLAMA3, rotary_dim=64, factor=32.0))
    for index, value in {15: 0.605573, 16: 0.303743, 17: 0.103448, 18: 0.03125, 31: 0.03125}.items():
        assert small[index] == pytest.approx(value, abs=2e-6), index


def test_dynamic_changes_only_beyond_the_trained_length() -> None:
    dynamic = RopeConfig(theta=1e4, rotary_dim=64, kind="dynamic", factor=2.0, original_max_position=1024)
    base = rope_inv_freq(replace(dynamic, kind="default"), 1024)[0]
    np.testing.assert_array_equal(rope_inv_freq(dynamic, 1024)[0], base)
    longer = rope_inv_freq(dynamic, 4096)[0]
    assert longer[0] == base[0]
    # theta grows by (2 * 4 - 1) ** (64 / 62); the last pair's exponent is 62 / 64, so its frequency shrinks by 7
    assert base[-1] / longer[-1] == pytest.approx(7.0, rel=1e-5)


def test_divisors_of_gguf() -> None:
    plain = RopeConfig(theta=1e4, rotary_dim=8)
    divided = rope_inv_freq(replace(plain, divisors=(1.0, 2.0, 4.0, 8.0)), 128)[0]
    np.testing.assert_array_equal(divided * np.array([1, 2, 4, 8], np.float32), rope_inv_freq(plain, 128)[0])
    with pytest.raises(CheckpointError, match="3 rope frequency divisors for 4"):
        rope_inv_freq(replace(plain, divisors=(1.0, 2.0, 4.0)), 128)


BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        YARN,
        {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN, "attention_factor": 1.25},
        {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
    ],
)
def test_same_frequencies_as_transformers(scaling: dict[str, Any], theta: float, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    content = {**BASE, "head_dim": head_dim, "rope_parameters": {"rope_theta": theta, **scaling}}
    theirs, their_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](LlamaConfig(**content), "cpu")
    ours, our_factor = rope_inv_freq(config_from_dict(content).rope, 4096)
    torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=3e-7, atol=0.0)
    assert our_factor == pytest.approx(their_factor, rel=1e-12)


def test_dynamic_beyond_the_trained_length_as_transformers_computes_a_prompt_of_that_length() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    content = {**BASE, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](LlamaConfig(**content), "cpu", seq_len=8192)
    ours, _ = rope_inv_freq(config_from_dict(content).rope, 8192)
    torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=3e-7, atol=0.0)
