"""Section A: head counts and widths, ranks, padded vocabularies. References: transformers, eager, float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from minisgl_core.core import Batch
from minisgl_core.errors import MinisglError
from minisgl_core.llm import LLM
from support.driver import Driver, greedy, make_engine, make_req

PROMPT, STEPS = 33, 8
RATIOS = [(9, 3, 64), (15, 5, 64), (14, 2, 64), (12, 2, 64), (40, 8, 64), (24, 4, 128), (28, 4, 128), (8, 1, 128)]
RATIOS += [(64, 4, 64), (7, 7, 128)]
HEAD_DIMS = [(32, 32, 80), (32, 32, 96), (8, 1, 256), (6, 3, 80)]


def greedy_run(model: Any) -> tuple[list[int], torch.Tensor]:
    """(prompt and continuation, logits (STEPS, V) before each token of the continuation), by transformers."""
    ids: list[int] = torch.randint(3, 500, (PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        for _ in range(STEPS):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
            ids.append(int(logits[-1].argmax()))
    return ids, logits[PROMPT - 1 : PROMPT - 1 + STEPS]


def forced_run(engine: Any, ids: list[int]) -> torch.Tensor:
    """(STEPS, V) float32: prefill of the prompt, then decode steps that are fed ``ids``."""
    req, rows = make_req(ids[:PROMPT], row=0, output_len=STEPS), []
    for step in range(STEPS):
        batch = Batch(reqs=[req], phase="decode" if step else "prefill")
        if step:
            batch.input_ids = torch.tensor(ids[PROMPT + step - 1 : PROMPT + step], dtype=torch.int32)
        rows.append(engine.forward_batch(batch, engine.sampler.prepare(batch)).logits[0].float().clone())
        req.append_token(ids[PROMPT + step])
    return torch.stack(rows)


def check_geometry(recipes: ModuleType, folder: Path, heads: tuple[int, int, int], **settings: Any) -> None:
    config = recipes._geometry(64, *heads, 64, num_hidden_layers=1, **recipes._rope("default"))
    model = recipes.build_model(recipes.Recipe("qwen3", config, seed=1))
    model.save_pretrained(folder)
    ids, expected = greedy_run(model)
    engine = make_engine(folder, rows=1, cuda_graph_max_bs=1, **settings)
    try:
        torch.testing.assert_close(forced_run(engine, ids), expected, rtol=0, atol=1e-4)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("attention", ["cpu", "torch"])
@pytest.mark.parametrize("heads", RATIOS, ids=str)
def test_case_1_odd_gqa_ratios(
    heads: tuple[int, int, int], attention: str, checkpoints: ModuleType, tmp_path: Path
) -> None:
    check_geometry(checkpoints, tmp_path, heads, backends={"attention": attention, "graph": "emulated"})


@pytest.mark.parametrize("attention", ["cpu", "torch"])
@pytest.mark.parametrize("heads", HEAD_DIMS, ids=str)
def test_case_2_head_dims(heads: tuple[int, int, int], attention: str, checkpoints: ModuleType, tmp_path: Path) -> None:
    check_geometry(checkpoints, tmp_path, heads, backends={"attention": attention, "graph": "emulated"})


def test_case_2_a_kv_row_that_is_no_multiple_of_128_bytes(checkpoints: ModuleType, tmp_path: Path) -> None:
    """3 kv heads of 80 in bfloat16: 480 bytes."""
    config = checkpoints._geometry(64, 6, 3, 80, 64, num_hidden_layers=1, **checkpoints._rope("default"))
    model = checkpoints.build_model(checkpoints.Recipe("qwen3", config, seed=1))
    model.save_pretrained(tmp_path)
    ids, expected = greedy_run(model)
    engine = make_engine(tmp_path, rows=1, dtype=torch.bfloat16)
    error = (forced_run(engine, ids) - expected).abs().amax(-1)
    engine.shutdown()
    assert (error <= 3e-2 * (expected.amax(-1) - expected.amin(-1))).all()


def test_case_3_heads_that_cannot_be_cut_are_refused_at_start(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(MinisglError) as caught:
        LLM(tiny("s93"), dtype=torch.float32, tp_size=2, max_running_req=1, num_page_override=64, progress=False)
    assert all(number in str(caught.value) for number in ("9", "3", "2"))


def test_case_3_and_4_more_ranks_than_kv_heads(tiny: Callable[[str], Path], answers: Callable[[str], Any]) -> None:
    """2 kv heads on 4 ranks: each is held twice, and the weight of k_norm belongs to all of them."""
    reference = answers("q3-8q2kv")
    with Driver(tiny("q3-8q2kv"), tp=4, page_size=16, num_page_override=16) as driver:
        assert driver.engine.kv_cache.k_cache(0).shape[2] == 1
        assert driver.tokens(reference.prompts, greedy(6)) == [tokens[:6] for tokens in reference.continuations]


def test_case_8_an_id_beyond_the_tokenizer(tiny: Callable[[str], Path]) -> None:
    """500 ids have text, the model has 512 and is made to like 505 best: the same on one rank and on two."""
    settings = {"dtype": torch.float32, "max_running_req": 2, "num_page_override": 128, "max_seq_len_override": 64}
    params, answers = [greedy(5, logit_bias={505: 1e5}), greedy(5)], []
    for tp_size in (1, 2):
        with LLM(tiny("q3-text"), tp_size=tp_size, page_size=1, progress=False, **settings) as llm:
            answers.append(llm.generate([[5, 6, 7], [8, 9]], params, progress=False))
    assert answers[0] == answers[1]
    assert answers[0][0]["token_ids"] == [505] * 5
    assert answers[0][0]["text"] == ""
    assert answers[0][0]["finish_reason"] == "length"
