"""Random workloads on whole engines with pools too small for them: whatever happens around a request, its tokens are
those of its solo run. The books are checked after every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from minisgl_core.core import SamplingParams
from support.driver import Driver

POOL = 96
"""Tokens: hardly more than the largest request; answers grow long enough to drive each other out."""
ENGINES: list[dict[str, Any]] = [
    {"page_size": 1, "cuda_graph_max_bs": 0, "cache": "radix", "overlap": True, "max_prefill_tokens": 16},
    {"page_size": 4, "cuda_graph_max_bs": 4, "cache": "radix", "overlap": True, "max_prefill_tokens": 8192},
    {"page_size": 8, "cuda_graph_max_bs": 4, "cache": "radix", "overlap": False, "max_prefill_tokens": 23},
    {"page_size": 4, "cuda_graph_max_bs": 0, "cache": "naive", "overlap": True, "max_prefill_tokens": 7},
]
SEEDS = range(3)


@dataclass(frozen=True)
class Planned:
    """One request of a workload. ``abort_after``: tokens after which the client drops it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    abort_after: int | None = None


def workload(seed: int) -> list[Planned]:
    """10 to 30 requests; many begin alike."""
    draw = Random(seed)
    stems = [[draw.randrange(3, 500) for _ in range(12)] for _ in range(3)]
    return [_plan(draw, stems) for _ in range(draw.randint(10, 30))]


def _plan(draw: Random, stems: list[list[int]]) -> Planned:
    stem = draw.choice(stems)[: draw.randint(0, 12)]
    prompt = (*stem, *(draw.randrange(3, 500) for _ in range(draw.randint(1, 8))))
    sampling = draw.choice(
        [
            {},
            {"temperature": 4.0, "seed": draw.randrange(2**40)},
            {"temperature": 4.0, "seed": draw.randrange(2**40), "top_k": 20, "top_p": 0.9},
            {"repetition_penalty": 1.3},
            {"presence_penalty": 30.0},
            {"temperature": 4.0, "seed": 1, "frequency_penalty": 15.0},
        ]
    )
    stop = [draw.randrange(3, 500) for _ in range(20)] if draw.random() < 0.2 else []
    params = SamplingParams(max_tokens=draw.randint(1, 70), ignore_eos=True, stop_token_ids=stop, **sampling)
    return Planned(prompt, params, draw.randint(0, 20) if draw.random() < 0.2 else None)


@pytest.fixture(scope="module")
def solo(small: Path) -> Any:
    """``solo(request)`` -> the tokens and the finish reason it gets alone: no cache, no overlap, no graphs."""
    settings = {"page_size": 1, "num_page_override": POOL, "max_seq_len_override": POOL}
    with Driver(small, overlap=False, cache="naive", **settings) as driver:

        @cache
        def run(prompt: tuple[int, ...], params: SamplingParams) -> tuple[list[int], str | None]:
            (answer,) = driver.serve([prompt], params)
            return answer.tokens, answer.finish_reason

        yield lambda request: run(request.prompt, request.params)


def play(driver: Driver, requests: list[Planned], draw: Random) -> dict[int, Planned]:
    """Serve them all: they arrive over time, some leave early. Returns which uid was whose."""
    coming, served = list(requests), {}
    while coming or driver.runner.has_work:
        while coming and draw.random() < 0.6:
            request = coming.pop()
            served[driver.submit(request.prompt, request.params)] = request
        driver.step()
        for uid, request in served.items():
            answer = driver.answers[uid]
            wanted = request.abort_after is None or len(answer.tokens) < request.abort_after
            if not wanted and answer.finish_reason is None:
                driver.abort(uid)
    driver.drain()
    return served


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: "-".join(map(str, e.values())))
def test_every_answer_is_that_of_the_solo_run(
    engine: dict[str, Any], small: Path, solo: Callable[[Planned], tuple[list[int], str | None]]
) -> None:
    pool = {"num_page_override": POOL // engine["page_size"], "max_seq_len_override": POOL, "max_running_req": 6}
    preemptions = aborts = 0
    with Driver(small, **engine, **pool) as driver:
        for seed in SEEDS:
            before = driver.scheduler.stats.preemptions
            for uid, request in play(driver, workload(seed), Random(seed)).items():
                answer, (tokens, reason) = driver.answers[uid], solo(request)
                if answer.finish_reason == "abort":
                    aborts += 1
                    assert answer.tokens == tokens[: len(answer.tokens)]
                else:
                    assert (answer.tokens, answer.finish_reason) == (tokens, reason)
            preemptions += driver.scheduler.stats.preemptions - before
        assert preemptions > 0 and aborts > 0
        assert bool(driver.replays) == bool(engine["cuda_graph_max_bs"])
