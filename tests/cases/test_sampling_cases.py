"""Section E in a whole engine: parameters, seeds, ranks, NaN, large batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.core import Batch, SamplingParams
from minisgl_core.errors import AdmissionError
from support.driver import Driver, greedy
from support.ranks_by_hand import tokens_of_each_rank

Prompts = Callable[..., list[int]]
HOT = 6.0
"""The tiny models are sure of themselves: at this temperature their answers vary."""


@pytest.mark.parametrize("ops", ["cpu", "composed"])
@pytest.mark.parametrize("temperature", [1e-5, 1e-8, 1e-38])
def test_case_38_tiny_temperatures_are_greedy(
    temperature: float, ops: str, small: Path, random_prompt: Prompts
) -> None:
    prompts = [random_prompt(9, seed) for seed in range(3)]
    with Driver(small, page_size=1, num_page_override=256, backends={"ops": ops}) as driver:
        cold = SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True)
        assert driver.tokens(prompts, cold) == driver.tokens(prompts, greedy(6))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -1),
        ("top_p", -0.1),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", math.nan),
        ("presence_penalty", math.inf),
        ("repetition_penalty", 0.0),
        ("logit_bias", {3: math.nan}),
    ],
)
def test_case_39_values_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with pytest.raises(AdmissionError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("ops", ["cpu", "composed"])
def test_case_42_extreme_filters(ops: str, small: Path, random_prompt: Prompts) -> None:
    prompt, hot = random_prompt(9), {"temperature": HOT, "max_tokens": 6, "ignore_eos": True, "seed": 3}
    with Driver(small, page_size=1, num_page_override=256, backends={"ops": ops}) as driver:
        (likeliest,) = driver.tokens([prompt], greedy(6))
        (free,) = driver.tokens([prompt], SamplingParams(**hot))
        assert free != likeliest
        for filters in ({"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}):
            assert driver.tokens([prompt], SamplingParams(**hot, **filters)) == [likeliest]
        for filters in ({"top_k": 2**30}, {"top_k": 512}, {"top_p": 1.0}):
            assert driver.tokens([prompt], SamplingParams(**hot, **filters)) == [free]


def test_case_43_a_seed_gives_one_answer_in_any_company(small: Path, random_prompt: Prompts, overlap: bool) -> None:
    prompt, others = random_prompt(9), [random_prompt(12, seed) for seed in range(1, 4)]

    def hot(seed: int | None, **more: Any) -> SamplingParams:
        return SamplingParams(temperature=HOT, max_tokens=12, ignore_eos=True, seed=seed, **more)

    with Driver(small, overlap=overlap, page_size=1, num_page_override=512, cuda_graph_max_bs=4) as driver:
        (alone,) = driver.tokens([prompt], hot(42))
        for place in range(4):
            for company in (hot(7), hot(None), greedy(12), hot(9, top_k=5)):
                prompts, params = list(others), [company] * 3
                prompts.insert(place, prompt)
                params.insert(place, hot(42))
                assert driver.tokens(prompts, params)[place] == alone
        assert driver.tokens([prompt] * 2, hot(42)) == [alone] * 2
        different = {tuple(driver.tokens([prompt], hot(seed))[0]) for seed in range(8)}
        anyhow = hot(None)
        unseeded = {tuple(driver.tokens([prompt], anyhow)[0]) for _ in range(8)}
    assert len(different) == len(unseeded) == 8


def test_case_44_ranks_sample_the_same_tokens(small: Path, random_prompt: Prompts) -> None:
    prompts = [random_prompt(4, seed) for seed in range(64)]
    params = SamplingParams(temperature=HOT, max_tokens=128, ignore_eos=True)
    settings = {"max_running_req": 64, "num_page_override": 64 * 9, "page_size": 16, "max_seq_len_override": 144}
    first, second = tokens_of_each_rank(2, small, prompts, params, **settings)
    assert first == second
    assert {len(tokens) for tokens in first.values()} == {128}
    assert len(set(map(tuple, first.values()))) == 64


@pytest.mark.parametrize("row", [0, 1, 2])
def test_case_45_nan_logits_end_one_request(
    row: int, small: Path, random_prompt: Prompts, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_prompt(20, seed) for seed in range(3)]
    with Driver(small, overlap=overlap, page_size=1, num_page_override=256) as driver:
        expected = [driver.tokens([prompt], greedy(8))[0] for prompt in prompts]
        driver.scheduler.clear_cache()
        model, before = driver.engine.stepper.model, driver.scheduler.stats.hit_tokens
        forward = model.forward

        def poisoned(batch: Batch) -> torch.Tensor:
            logits: torch.Tensor = forward(batch)
            for i, req in enumerate(batch.reqs):
                if req.uid == 3 + row and req.device_len == 20 + 3:
                    logits[i, 100] = torch.nan
            return logits

        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", poisoned)
            answers = driver.serve(prompts, greedy(8))
        for i, answer in enumerate(answers):
            assert answer.tokens == (expected[i][:3] if i == row else expected[i])
            assert answer.finish_reason == ("error" if i == row else "length")
        assert answers[row].error is not None and "NaN" in answers[row].error
        assert driver.tokens([prompts[row]], greedy(8)) == [expected[row]]
        assert driver.scheduler.stats.hit_tokens == before


@pytest.mark.parametrize("name", ["mistral-full", "moe", "q3"])
def test_case_46_greedy_alone_and_in_a_batch(name: str, tiny: Callable[[str], Path], random_prompt: Prompts) -> None:
    """32 Reqs that end one after the other: batch sizes cross every graph size, padded and not."""
    prompts = [random_prompt(3 + seed % 7, seed) for seed in range(32)]
    settings = {"page_size": 16, "num_page_override": 128, "max_running_req": 32, "cache": "naive"}
    with Driver(tiny(name), cuda_graph_max_bs=16, **settings) as driver:
        params = [greedy(1 + i // 2) for i in range(32)]
        together = driver.tokens(prompts, params)
        sizes = {padded for _, padded in driver.replays}
        alone = [driver.tokens([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
        (one,) = driver.tokens([prompts[0]], greedy(4))
        same = driver.tokens([prompts[0]] * 32, greedy(4))
    assert together == alone
    assert sizes == {2, 4, 8, 16}
    assert same == [one] * 32
