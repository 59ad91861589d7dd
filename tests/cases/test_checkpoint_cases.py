"""Sections I and J in a whole engine: heads, shards, stray files, dtypes. Loading's own tests have the details."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from minisgl_core.errors import CheckpointError
from support.driver import Driver, greedy, make_engine, prefill_logits
from support.edited_checkpoints import Tensors, edited, load_tensors

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [400, 30]]


def logits_of(folder: Path, **settings: Any) -> torch.Tensor:
    engine = make_engine(folder, **settings)
    try:
        return prefill_logits(engine, PROMPTS)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("moe", [None, "auto"])
def test_case_76_a_moe_model_needs_no_flags(
    moe: str | None, tiny: Callable[[str], Path], answers: Callable[[str], Any]
) -> None:
    reference, settings = answers("moe"), {"backends": {"moe": moe}} if moe else {}
    with Driver(tiny("moe"), num_page_override=256, page_size=1, **settings) as driver:
        assert driver.tokens(reference.prompts, greedy(16)) == reference.continuations


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_case_77_tied_or_not(
    flag: bool, head: str, tiny: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A head in the file is never dropped; without one the embedding serves, with a warning if the config says no."""
    own = load_tensors(tiny("q3-untied"))["lm_head.weight"]

    def edit(tensors: Tensors) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = own if head == "different" else embedding.clone()
        if head == "absent":
            del tensors["lm_head.weight"]

    source = tiny("q3-untied")
    config = {"tie_word_embeddings": flag}
    with caplog.at_level(logging.WARNING):
        got = logits_of(edited(source, tmp_path / "model", config=config, tensors=edit))
    assert ("lm_head" in caplog.text) == ((flag, head) in {(False, "absent"), (True, "different")})
    embedding = load_tensors(source)["model.embed_tokens.weight"]
    wanted = own if head == "different" else embedding
    expected = edited(
        source,
        tmp_path / "expected",
        config={"tie_word_embeddings": False},
        tensors=lambda tensors: tensors.update({"lm_head.weight": wanted.clone()}),
    )
    torch.testing.assert_close(got, logits_of(expected), rtol=0, atol=1e-5)


def test_case_78_a_missing_shard_is_named(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = edited(tiny("q3-sharded"), tmp_path / "model")
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        make_engine(folder)


def test_case_79_an_index_wins_over_stray_files(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = edited(tiny("q3-sharded"), tmp_path / "model")
    wrong = {name: torch.ones_like(tensor) for name, tensor in load_tensors(tiny("q3")).items()}
    for name in ("model.safetensors", "consolidated.safetensors"):
        save_file(wrong, folder / name)
    assert torch.equal(logits_of(folder), logits_of(tiny("q3")))


def test_case_80_bin_files_only(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = edited(tiny("q3"), tmp_path / "model")
    torch.save(load_tensors(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        make_engine(folder)


def test_case_81_missing_extra_and_misshapen(
    tiny: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.1.self_attn.k_norm.weight"
    missing = edited(tiny("q3"), tmp_path / "missing", tensors=lambda held: held.pop(name))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        make_engine(missing)
    misshapen = edited(tiny("q3"), tmp_path / "misshapen", tensors=lambda held: held.update({name: torch.ones(64)}))
    with pytest.raises(CheckpointError, match=r"k_norm.*128.*64"):
        make_engine(misshapen)
    extras = {"surplus.weight": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(64)}
    extra = edited(tiny("q3"), tmp_path / "extra", tensors=lambda held: held.update(extras))
    with caplog.at_level(logging.WARNING):
        got = logits_of(extra)
    assert "surplus.weight" in caplog.text and "inv_freq" not in caplog.text
    assert torch.equal(got, logits_of(tiny("q3")))


@pytest.mark.parametrize("key", ["torch_dtype", "dtype", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_case_83_the_checkpoints_dtype(
    dtype: torch.dtype,
    key: str | None,
    tiny: Callable[[str], Path],
    checkpoints: Any,
    tmp_path: Path,
    random_prompt: Callable[..., list[int]],
) -> None:
    """Honoured under either key, taken from the weights without one; ids are those of transformers in that dtype."""
    name = str(dtype).removeprefix("torch.")
    folder = edited(
        tiny("q3"),
        tmp_path / "model",
        config={"dtype": None, "torch_dtype": None, **({key: name} if key else {})},
        tensors=lambda held: held.update({key: tensor.to(dtype) for key, tensor in held.items()}),
    )
    assert json.loads((folder / "config.json").read_text()).get(key or "dtype") == (name if key else None)
    prompts = [random_prompt(7, seed) for seed in (1, 2, 7)]
    engine = make_engine(folder, dtype=None)
    assert engine.dtype == engine.kv_cache.k_cache(0).dtype == dtype
    got = prefill_logits(engine, prompts).argmax(-1).tolist()
    engine.shutdown()
    model = checkpoints.load_model(folder).to(dtype)
    with torch.inference_mode():
        rows = [model(torch.tensor([prompt])).logits[0, -1].float() for prompt in prompts]
    assert min(float(-row.topk(2).values.diff()) for row in rows) > 1  # far beyond what rounding can do
    assert got == [int(row.argmax()) for row in rows]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_a_quantised_tensor_is_named_and_not_cast(dtype: torch.dtype, small: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)

    folder = edited(small, tmp_path / "model", tensors=edit)
    with pytest.raises(CheckpointError, match=f"model.norm.weight: {str(dtype).removeprefix('torch.')}; .* quantised"):
        make_engine(folder)
