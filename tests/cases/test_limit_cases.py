"""Section D in a whole engine: contexts, pools, empty prompts, max_tokens, stop tokens that come first."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from minisgl_core.core import SamplingParams
from minisgl_core.errors import AdmissionError
from minisgl_core.llm import LLM
from support.driver import Driver, greedy
from support.edited_checkpoints import edited

Prompts = Callable[..., list[int]]
SETTINGS: dict[str, Any] = {"dtype": torch.float32, "page_size": 1, "num_page_override": 256, "progress": False}


@pytest.fixture
def llm(tiny: Callable[[str], Path]) -> Iterator[LLM]:
    """With a tokenizer that adds no BOS."""
    with LLM(tiny("q3-text"), max_running_req=4, max_seq_len_override=128, **SETTINGS) as made:
        yield made


def test_case_31_prompts_around_the_context(small: Path, random_prompt: Prompts, overlap: bool) -> None:
    other = random_prompt(10)
    with Driver(small, overlap=overlap, page_size=1, num_page_override=256, max_seq_len_override=64) as driver:
        (expected,) = driver.tokens([other], greedy(50))
        uid = driver.submit(other, greedy(50))
        for _ in range(5):
            driver.step()
        fits, *others = (driver.submit(random_prompt(length), greedy(50)) for length in (63, 64, 65, 6500))
        driver.step()
        for other, length in zip(others, (64, 65, 6500), strict=True):
            answer = driver.answers[other]
            assert (answer.tokens, answer.finish_reason) == ([], "error")
            assert answer.error is not None and str(length) in answer.error and "64" in answer.error
        driver.drain()
        assert driver.answers[uid].tokens == expected
        assert len(driver.answers[fits].tokens) == 1
        assert driver.answers[fits].finish_reason == "length"


def test_case_33_max_tokens_is_capped_at_what_is_left(llm: LLM, random_prompt: Prompts) -> None:
    (answer,) = llm.generate([random_prompt(100)], greedy(200), progress=False)
    assert (len(answer["token_ids"]), answer["finish_reason"]) == (28, "length")


def test_case_34_refused_requests_leave_the_pool_empty(llm: LLM, random_prompt: Prompts) -> None:
    for _ in range(20):
        with pytest.raises(AdmissionError, match=r"128.*256"):
            llm.generate([random_prompt(5), random_prompt(128)], greedy(5), progress=False)
    stats = llm.scheduler.stats
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, llm.engine.num_pages)


@pytest.mark.parametrize("prompts", ["", [""], [[]], ["fine", ""]], ids=repr)
def test_case_35_an_empty_prompt_is_refused(prompts: Any, llm: LLM) -> None:
    with pytest.raises(AdmissionError, match="empty"):
        llm.generate(prompts, greedy(2), progress=False)
    (answer,) = llm.generate(["still alive"], greedy(2), progress=False)
    assert len(answer["token_ids"]) == 2


def test_case_35_with_a_bos_the_empty_text_is_a_prompt(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("q3-text"), tmp_path / "model")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = ("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    tokenizer.save(str(folder / "tokenizer.json"))
    with LLM(folder, max_running_req=1, max_seq_len_override=64, **SETTINGS) as llm:
        (empty,) = llm.generate([""], greedy(4), progress=False)
        (by_id,) = llm.generate([[bos[1]]], greedy(4), progress=False)
    assert empty == by_id
    assert len(empty["token_ids"]) == 4


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_case_36_max_tokens_that_make_no_sense(count: Any) -> None:
    with pytest.raises(AdmissionError, match="max_tokens"):
        SamplingParams(max_tokens=count)


def test_case_36_one_token_and_the_default(llm: LLM) -> None:
    one, default = llm.generate(
        [[5, 6], [5, 6]], [SamplingParams(max_tokens=1), SamplingParams(ignore_eos=True)], progress=False
    )
    assert (len(one["token_ids"]), one["finish_reason"]) == (1, "length")
    assert SamplingParams().max_tokens == 1024
    assert (len(default["token_ids"]), default["finish_reason"]) == (126, "length")  # capped by the context of 128


def test_case_37_a_stop_token_sampled_first(
    tiny: Callable[[str], Path], tmp_path: Path, random_prompt: Prompts
) -> None:
    """A head of zeros ties all logits: the lowest id is chosen, and it is the model's EOS."""
    folder = edited(
        tiny("q3-text"),
        tmp_path / "model",
        config={"tie_word_embeddings": False, "eos_token_id": 0},
        generation={"eos_token_id": 0},
        tensors=lambda held: held.update({"lm_head.weight": torch.zeros_like(held["model.embed_tokens.weight"])}),
    )
    settings = {**SETTINGS, "max_running_req": 8, "max_seq_len_override": 64, "max_prefill_tokens": 16}
    with LLM(folder, cuda_graph_max_bs=8, **settings) as llm:
        prompts = [random_prompt(40 if uid % 10 == 0 else 5, seed=uid) for uid in range(100)]
        answers = llm.generate(prompts, SamplingParams(max_tokens=10), progress=False)
        assert {(answer["text"], tuple(answer["token_ids"]), answer["finish_reason"]) for answer in answers} == {
            ("", (0,), "stop")
        }
        stats = llm.scheduler.stats
        assert stats.free_pages + stats.cached_pages == llm.engine.num_pages
        (alive,) = llm.generate([random_prompt(5)], greedy(3), progress=False)
        assert alive["token_ids"] == [0, 0, 0]
