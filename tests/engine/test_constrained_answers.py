"""Constrained rows in a whole engine, against transformers: overlap, graphs, preemption, ranks, and other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from minisgl_core.llm.grammars import GrammarQueue
from support.constrained import EVEN, Evens
from support.driver import Driver, greedy

MODEL = "q3-text"
VOCAB, END, COUNT = 512, 511, 20
MARGIN = 1e-4


@pytest.fixture(scope="module")
def model(checkpoints: ModuleType) -> Any:
    return checkpoints.load_model(checkpoints.ensure_checkpoint(MODEL))


def continued(model: Any, prompt: Sequence[int], count: int, even: bool) -> list[int]:
    """transformers' likeliest tokens, the odd ones masked if ``even``."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            if even:
                logits[1::2] = -torch.inf
            best = logits.topk(2)
            assert float(best.values[0] - best.values[1]) > MARGIN, "draw another prompt: this margin proves nothing"
            ids.append(int(best.indices[0]))
    return ids[len(prompt) :]


@contextmanager
def driven(path: Path, length: int | None = None, **settings: Any) -> Iterator[tuple[Driver, Evens]]:
    with Driver(path, page_size=1, **settings) as driver:
        grammars = Evens(driver.engine.vocab_size, driver.engine.vocab_size - 1, length)
        driver.runner.grammars = driver.scheduler._constrained._grammars = grammars  # type: ignore[assignment]
        driver.runner._held = GrammarQueue(driver.runner.grammars)
        yield driver, grammars


PROMPTS = [torch.randint(3, 500, (12,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(4)]


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[bool, list[list[int]]]:
    return {even: [continued(model, prompt, COUNT, even) for prompt in PROMPTS] for even in (False, True)}


@pytest.mark.parametrize(
    ("tp", "pages", "graph", "overlap"),
    [(1, 400, 4, True), (1, 400, 0, False), (1, 56, 4, True), (2, 56, 4, True)],
)
def test_rows_with_and_without_a_grammar_equal_transformers(
    tp: int, pages: int, graph: int, overlap: bool, tiny: Callable[[str], Path], expected: Any
) -> None:
    """In 56 pages of one token two answers do not fit to the end: one is preempted, and keeps its state."""
    settings = {"num_page_override": pages, "cuda_graph_max_bs": graph, "max_prefill_tokens": 7}
    with driven(tiny(MODEL), tp=tp, overlap=overlap, **settings) as (driver, grammars):
        served = driver.tokens(PROMPTS, [greedy(COUNT, grammar=EVEN) if i % 2 else greedy(COUNT) for i in range(4)])
        assert served == [expected[bool(i % 2)][i] for i in range(4)]
        assert [matcher.accepted for matcher in grammars.matchers] == [served[1], served[3]]
        assert bool(driver.scheduler.stats.preemptions) == (pages < 400)
        assert bool(driver.replays) == bool(graph)


def test_complete_answers_end_on_all_ranks(tiny: Callable[[str], Path], expected: Any) -> None:
    with driven(tiny(MODEL), length=5, tp=2, num_page_override=400) as (driver, _):
        params = [greedy(COUNT, grammar=EVEN), greedy(5, grammar=EVEN), greedy(COUNT), greedy(4, grammar=EVEN)]
        found = driver.serve(PROMPTS, params)
        evens, plain = expected[True], expected[False]
        assert [answer.tokens for answer in found] == [evens[0][:5], evens[1][:5], plain[2], evens[3][:4]]
        assert [answer.finish_reason for answer in found] == ["stop", "stop", "length", "length"]


@pytest.mark.parametrize("overlap", [True, False])
def test_masks_hold_for_sampled_rows_with_every_other_option(overlap: bool, tiny: Callable[[str], Path]) -> None:
    """Equal seeds, overlap or not, alone or together: equal tokens, all of them even, with log-probabilities."""
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "repetition_penalty": 1.2, "logit_bias": {7: 1e5, 8: 2.0}}
    params = greedy(COUNT, grammar=EVEN, logprobs=2, **options)
    with driven(tiny(MODEL), overlap=overlap, num_page_override=400) as (driver, _):
        alone = driver.tokens([PROMPTS[0]], params)[0]
        both = driver.tokens([PROMPTS[0], PROMPTS[1]], [params, greedy(COUNT, presence_penalty=1.0)])[0]
        assert alone == both and len(alone) == COUNT and not any(token % 2 for token in alone)
        seeded = driver.tokens([PROMPTS[0]] * 2, [params, greedy(COUNT, grammar=EVEN, min_tokens=3, **options)])
        assert seeded == [alone, alone]
