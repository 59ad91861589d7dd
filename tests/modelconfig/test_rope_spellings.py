"""What the many spellings of rotary embedding in a config.json mean."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from minisgl_core.errors import CheckpointError
from minisgl_core.modelconfig import config_from_dict, rope_inv_freq
from support.model_configs import LLAMA, MISTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, family, without


def test_case_09_rope_theta_in_either_place(caplog: pytest.LogCaptureFixture) -> None:
    bare = {**without(QWEN3, "rope_theta"), "head_dim": 128}
    old = config_from_dict({**bare, "rope_theta": 1e6})
    new = config_from_dict({**bare, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert old.rope == new.rope
    assert old.rope.theta == 1e6
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert config_from_dict(bare).rope.theta == 10_000.0
    assert "rope_theta" in caplog.text


def test_case_09_rope_parameters_win_over_a_stale_theta() -> None:
    config = config_from_dict({**LLAMA, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}})
    assert config.rope.theta == 1e6


def test_rope_scaling_added_to_a_new_config_keeps_its_theta() -> None:
    scaling = {"type": "linear", "factor": 4}
    content = {**without(LLAMA, "rope_theta"), "rope_parameters": {"rope_theta": 5e5}, "rope_scaling": scaling}
    rope = config_from_dict(content).rope
    assert (rope.theta, rope.kind, rope.factor) == (5e5, "linear", 4.0)


def test_case_10_default_scaling_is_no_scaling() -> None:
    scaling = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}
    assert (
        config_from_dict({**LLAMA, "rope_scaling": scaling}).rope == config_from_dict({**LLAMA, "rope_theta": 1e6}).rope
    )


@pytest.mark.parametrize("scaling", [{"type": "linear", "factor": 4}, {"type": "dynamic", "factor": 2}])
def test_case_11_the_old_key_type(scaling: dict[str, Any]) -> None:
    new = {"rope_type": scaling["type"], "factor": scaling["factor"]}
    rope = config_from_dict({**LLAMA, "rope_scaling": scaling}).rope
    assert rope == config_from_dict({**LLAMA, "rope_scaling": new}).rope
    assert (rope.kind, rope.factor) == (scaling["type"], scaling["factor"])


SPELLINGS = [
    lambda factor: {"partial_rotary_factor": factor, "rope_scaling": None},
    lambda factor: {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": factor}},
    lambda factor: {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": factor}},
    lambda factor: {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": factor},
]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("config", [LLAMA, MISTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE], ids=lambda c: c["model_type"])
def test_case_14_families_that_rotate_whole_heads_refuse_less(config: dict[str, Any], spelling: Any) -> None:
    wide = {**config, "head_dim": 128}
    assert config_from_dict({**wide, **spelling(1.0)}).rope.rotary_dim == 128
    with pytest.raises(CheckpointError, match=f"`partial_rotary_factor` .* is 0.5, .* {config['model_type']} model"):
        config_from_dict({**wide, **spelling(0.5)})


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_case_14_a_plugins_family_may_rotate_less(spelling: Any) -> None:
    mine = family("mine", "MineForCausalLM", head_dim=80)
    assert config_from_dict({**mine, **spelling(0.4)}).rope.rotary_dim == 32
    for factor in (33 / 80, 0.01):
        with pytest.raises(CheckpointError, match=r"partial_rotary_factor.*would rotate (33|0) of 80"):
            config_from_dict({**mine, **spelling(factor)})


def test_case_14_same_frequencies_as_a_family_of_transformers_that_rotates_less() -> None:
    from transformers import StableLmConfig
    from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4}
    config = StableLmConfig(hidden_size=320, num_attention_heads=4, rope_parameters=dict(parameters))
    mine = family("mine", "MineForCausalLM", hidden_size=320, num_attention_heads=4, rope_parameters=parameters)
    ours, _ = rope_inv_freq(config_from_dict(mine).rope, 128)
    torch.testing.assert_close(torch.from_numpy(ours), StableLmRotaryEmbedding(config).inv_freq, rtol=3e-7, atol=0.0)


def test_yarn_without_factor_takes_the_ratio_of_lengths() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    rope = config_from_dict({**LLAMA, "max_position_embeddings": 4096, "rope_scaling": scaling}).rope
    assert (rope.factor, rope.original_max_position) == (4.0, 1024)


def test_rope_by_layer_type_only_if_equal() -> None:
    same = {"rope_type": "default", "rope_theta": 1e6}
    both = {"full_attention": same, "sliding_attention": same}
    assert config_from_dict({**LLAMA, "rope_parameters": both}).rope.theta == 1e6
    both = {"full_attention": same, "sliding_attention": {**same, "rope_theta": 1e4}}
    with pytest.raises(CheckpointError, match="differs between layer types"):
        config_from_dict({**LLAMA, "rope_parameters": both})
