"""Section B in a whole engine: rotary embedding, positions, sliding windows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.core import Batch
from minisgl_core.errors import CheckpointError
from minisgl_core.modelconfig.families import FAMILIES
from support.driver import make_engine, make_req, prefill_logits
from support.edited_checkpoints import edited


def logits_of(folder: Path, prompts: Sequence[Sequence[int]], **settings: Any) -> torch.Tensor:
    engine = make_engine(folder, **settings)
    try:
        return prefill_logits(engine, prompts)
    finally:
        engine.shutdown()


@pytest.fixture
def with_rope(tiny: Callable[[str], Path], tmp_path: Path) -> Callable[..., torch.Tensor]:
    """Logits of q3's weights with other rope keys: ``with_rope(rope_theta=1e6)``."""

    def compute(**keys: Any) -> torch.Tensor:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        config = {"rope_parameters": None, "rope_scaling": None, "rope_theta": None, **keys}
        prompt = list(range(3, 43))
        return logits_of(edited(tiny("q3"), folder, config=config), [prompt])

    return compute


def test_case_9_theta_in_either_spelling_or_the_default_with_a_warning(
    with_rope: Callable[..., torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    old = with_rope(rope_theta=1e6)
    new = with_rope(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        neither = with_rope()
    assert any("rope_theta" in record.message for record in caplog.records)
    assert torch.equal(old, new)
    assert torch.equal(neither, with_rope(rope_theta=1e4))
    assert (neither - old).abs().max() > 1


def test_case_10_default_scaling_is_none(with_rope: Callable[..., torch.Tensor]) -> None:
    plain = with_rope(rope_theta=1e6)
    scaling = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}
    assert torch.equal(plain, with_rope(rope_theta=1e6, rope_scaling=scaling))


def test_case_11_the_old_key_type_and_unknown_kinds(with_rope: Callable[..., torch.Tensor]) -> None:
    old = with_rope(rope_theta=1e6, rope_scaling={"type": "linear", "factor": 4})
    new = with_rope(rope_theta=1e6, rope_scaling={"rope_type": "linear", "factor": 4})
    assert torch.equal(old, new)
    assert (old - with_rope(rope_theta=1e6)).abs().max() > 1
    with pytest.raises(CheckpointError, match="spiral"):
        with_rope(rope_theta=1e6, rope_scaling={"type": "spiral", "factor": 4})


@pytest.mark.parametrize("factor", [0.5, 0.25])
def test_case_14_dimensions_past_the_rotary_ones_know_no_position(
    factor: float, tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token at many places: in the first layer its key may differ in the rotated dimensions only.

    Of the families that the core brings none rotates less than whole heads; one that did would be read like this.
    """
    monkeypatch.setitem(FAMILIES, "qwen3", replace(FAMILIES["qwen3"], partial_rotary=True))
    config = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": factor}}
    engine = make_engine(edited(tiny("q3"), tmp_path / "model", config=config), rows=1)
    prefill_logits(engine, [[7] * 100])
    keys = engine.kv_cache.k_cache(0).flatten(0, 1)[:100].clone()  # (tokens, kv heads, 128)
    engine.shutdown()
    rotated = int(128 * factor)
    # Blocked matrix products may round one row otherwise than another.
    torch.testing.assert_close(keys[0, :, rotated:].expand(100, -1, -1), keys[:, :, rotated:], rtol=0, atol=1e-5)
    moved = (keys[99, :, :rotated] - keys[0, :, :rotated]).abs().amax(0)
    assert (moved[: rotated // 4] > 0.1).all()


ROPE_NUMBERS: dict[str, dict[str, float]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}


def write_tiny(model_type: str, rope: dict[str, Any], folder: Path) -> Path:
    """A model of one layer with transformers' own random weights, saved by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        rope_parameters=rope,
        initializer_range=0.5,
        **({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if "moe" in model_type else {}),
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def their_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return logits


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"])
def test_case_14_what_transformers_does_not_do_is_refused(kind: str, model_type: str, tmp_path: Path) -> None:
    """Whole heads: the same logits. A part of them: transformers ignores it in the plain kind and fails in the others,
    and we refuse it.
    """
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPE_NUMBERS[kind]}
    tokens = list(range(3, 23))
    whole = write_tiny(model_type, {**rope, "partial_rotary_factor": 1.0}, tmp_path / "whole")
    expected = their_logits(whole, tokens)
    torch.testing.assert_close(logits_of(whole, [tokens])[0], expected, rtol=0, atol=1e-4)

    part = edited(whole, tmp_path / "part", config={"rope_parameters": {**rope, "partial_rotary_factor": 0.5}})
    if kind == "default":
        assert torch.equal(their_logits(part, tokens), expected)
    else:
        with pytest.raises(RuntimeError, match="must match the size"):
            their_logits(part, tokens)
    with pytest.raises(CheckpointError, match=f"`partial_rotary_factor` .* is 0.5, .* {model_type} model"):
        logits_of(part, [tokens])


def test_case_15_the_first_decode_is_a_prefill_of_one_more(
    small: Path, random_prompt: Callable[..., list[int]]
) -> None:
    prompt = random_prompt(17)
    engine = make_engine(small)
    req = make_req(prompt, row=0, output_len=2)
    first = Batch(reqs=[req], phase="prefill")
    req.append_host(engine.forward_batch(first, engine.sampler.prepare(first)).next_tokens_cpu)
    second = Batch(reqs=[req], phase="decode")
    decoded = engine.forward_batch(second, engine.sampler.prepare(second)).logits.clone()
    assert second.positions is not None and second.positions.tolist() == [17]
    fresh = prefill_logits(engine, [[0], req.tokens.tolist()])[1:]
    engine.shutdown()
    torch.testing.assert_close(decoded, fresh, rtol=0, atol=1e-4)


@pytest.mark.parametrize("attention", ["cpu", "torch"])
def test_case_16_a_query_sees_eight_keys(
    attention: str, tiny: Callable[[str], Path], tmp_path: Path, random_prompt: Callable[..., list[int]]
) -> None:
    """One layer with a window of 8, 40 tokens: the last logits know tokens 32 to 39 and no other."""
    folder = edited(
        tiny("mistral-window"),
        tmp_path / "model",
        config={"num_hidden_layers": 1},
        tensors=lambda held: [held.pop(name) for name in list(held) if name.startswith("model.layers.1.")],
    )
    prompt = random_prompt(40)
    seen, unseen = [list(prompt), list(prompt)]
    seen[32] = unseen[31] = 500
    plain, changed_inside, changed_outside = logits_of(
        folder, [prompt, seen, unseen], backends={"attention": attention}
    )
    torch.testing.assert_close(plain, changed_outside, rtol=0, atol=1e-5)
    assert (plain - changed_inside).abs().max() > 1e-2


def test_case_16_layers_and_switches_without_a_window(
    tiny: Callable[[str], Path], tmp_path: Path, random_prompt: Callable[..., list[int]]
) -> None:
    """``layer_types`` that are all full_attention, or ``use_sliding_window`` false: full attention everywhere."""
    prompts = [random_prompt(40)]
    for name, off in (
        ("mistral-window", {"layer_types": ["full_attention"] * 2}),
        ("qwen2-window", {"use_sliding_window": False, "layer_types": None}),
    ):
        full = edited(tiny(name), tmp_path / f"{name}-full", config={"sliding_window": None, "layer_types": None})
        switched_off = edited(tiny(name), tmp_path / f"{name}-off", config=off)
        expected = logits_of(full, prompts)
        assert torch.equal(logits_of(switched_off, prompts), expected)
        assert (logits_of(tiny(name), prompts) - expected).abs().max() > 0.1
