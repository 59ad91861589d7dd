"""Section C in a whole engine: prefix cache, pages, chunks. The scheduler's own tests have the same cases on a stub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minisgl_core.core import Batch
from support.driver import Driver, greedy, make_engine, make_req

Prompts = Callable[..., list[int]]


def alone(folder: Path, prompts: list[list[int]], steps: int, **settings: int) -> list[list[int]]:
    """What each prompt is answered by itself, whole, without any cache: page size 1, no overlap."""
    with Driver(folder, overlap=False, page_size=1, num_page_override=2048, cache="naive", **settings) as driver:
        return [driver.tokens([prompt], greedy(steps))[0] for prompt in prompts]


@pytest.mark.parametrize("length", [16, 32, 48])
def test_case_17_a_prompt_that_fills_its_pages_sent_three_times(
    length: int, small: Path, random_prompt: Prompts, overlap: bool
) -> None:
    prompt = random_prompt(length)
    expected = alone(small, [prompt], 6)
    with Driver(small, overlap=overlap, page_size=16, num_page_override=16) as driver:
        assert [driver.tokens([prompt], greedy(6)) for _ in range(3)] == [expected] * 3
        assert driver.scheduler.stats.hit_tokens == 2 * (length - 16)


def test_case_21_lengths_around_a_page(small: Path, random_prompt: Prompts) -> None:
    prompts = [random_prompt(length) for length in (1, 15, 16, 17, 31, 33)]  # each the beginning of the next
    with Driver(small, page_size=16, num_page_override=32) as driver:
        got = [driver.tokens([prompt], greedy(6))[0] for prompt in prompts]
        assert driver.scheduler.stats.hit_tokens == 0 + 0 + 0 + 16 + 16 + 16
    assert got == alone(small, prompts, 6)


def test_case_21_prompts_that_share_63_tokens(small: Path, random_prompt: Prompts) -> None:
    shared = random_prompt(63)
    prompts = [shared + random_prompt(20, seed=1), shared + random_prompt(20, seed=2)]
    with Driver(small, page_size=64, num_page_override=8) as driver:
        got = [driver.tokens([prompt], greedy(6))[0] for prompt in prompts]
        assert driver.scheduler.stats.hit_tokens == 0
    assert got == alone(small, prompts, 6)


def test_case_22_a_row_that_changes_hands(small: Path, random_prompt: Prompts, overlap: bool) -> None:
    first, other = random_prompt(20, seed=1), random_prompt(40, seed=2)
    with Driver(small, overlap=overlap, page_size=1, num_page_override=256, max_running_req=1) as driver:
        got = [driver.tokens([prompt], greedy(6))[0] for prompt in (first, other, first)]
        assert driver.scheduler.stats.hit_tokens == 19
    assert got == alone(small, [first, other, first], 6)


def test_case_24_a_cache_hit_does_not_change_the_answer(small: Path, random_prompt: Prompts) -> None:
    prompt = random_prompt(1464)
    answers = []
    for cache, hits in (("radix", 3 * 1456), ("naive", 0)):
        settings = {"page_size": 16, "num_page_override": 256, "max_seq_len_override": 1600, "cache": cache}
        with Driver(small, **settings) as driver:
            answers += [driver.tokens([prompt], greedy(8))[0] for _ in range(4)]
            assert driver.scheduler.stats.hit_tokens == hits
    assert answers == [answers[0]] * 8
    assert len(answers[0]) == 8


@pytest.mark.parametrize(("attention", "chunks"), [("cpu", (1, 255, 256, 257, 999)), ("torch", (16, 255, 257, 999))])
def test_case_26_logits_do_not_depend_on_chunks(
    attention: str, chunks: tuple[int, ...], small: Path, random_prompt: Prompts
) -> None:
    prompt = random_prompt(1000)
    engine = make_engine(small, rows=1, length=1024, backends={"attention": attention})

    def logits(chunk: int) -> torch.Tensor:
        for end in [*range(chunk, 1000, chunk), 1000]:
            req = make_req(prompt[:end], row=0, cached_len=(end - 1) // chunk * chunk)
            batch = Batch(reqs=[req], phase="prefill")
            out = engine.forward_batch(batch, engine.sampler.prepare(batch))
        return out.logits.clone()

    whole = logits(1000)
    for chunk in chunks:
        torch.testing.assert_close(logits(chunk), whole, rtol=0, atol=1e-4)
    engine.shutdown()


def test_case_27_chunks_bring_no_tokens(small: Path, random_prompt: Prompts, overlap: bool) -> None:
    prompts = [random_prompt(40), random_prompt(7, seed=1)]
    with Driver(small, overlap=overlap, page_size=1, num_page_override=256, max_prefill_tokens=16) as driver:
        got = driver.tokens(prompts, [greedy(7), greedy(1)])
    assert got == [alone(small, prompts[:1], 7)[0], alone(small, prompts[1:], 1)[0]]


@pytest.mark.parametrize(("pool", "expected"), [(50, 50), (200, 100)])
def test_case_30_stops_at_context_or_pool(
    pool: int, expected: int, small: Path, random_prompt: Prompts, overlap: bool
) -> None:
    settings = {"page_size": 1, "num_page_override": pool, "max_seq_len_override": 100, "cuda_graph_max_bs": 1}
    with Driver(small, overlap=overlap, max_running_req=1, **settings) as driver:
        (answer,) = driver.serve([random_prompt(7)], greedy(1000))
    assert (7 + len(answer.tokens), answer.finish_reason) == (expected, "length")
