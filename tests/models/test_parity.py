"""Greedy tokens equal transformers' in float32, whatever the settings for pages, chunks, caches, overlap,
graphs and ranks.

Each run serves three short prompts and a long one together, then the same again, then prompts that go on into what was
generated before. CI runs a set that covers every pair of settings, and every checkpoint; the full product is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.driver import Driver, greedy
from support.runs import FACTORS, FAMILIES, MAX_RUNS, VARIANTS, all_with_one_rank, all_with_two_ranks, runs_in_ci


def ident(run: dict[str, Any]) -> str:
    overlap = "overlap" if run["overlap"] else "plain"
    return "{name}-p{page_size}-c{chunk}-tp{tp}-g{graph}-{cache}-".format(**run) + overlap


def run_id(value: object) -> str | None:
    return ident(value) if isinstance(value, dict) else None


def settings_of(run: dict[str, Any]) -> dict[str, Any]:
    return {"max_prefill_tokens": run["chunk"], "cache": run["cache"], "overlap": run["overlap"]}


def start(run: dict[str, Any], path: Path) -> Driver:
    page_size = run["page_size"]
    pool = {"page_size": page_size, "num_page_override": 640 // page_size}
    return Driver(path, tp=run["tp"], cuda_graph_max_bs=run["graph"], **pool, **settings_of(run))


def check(driver: Driver, run: dict[str, Any], reference: Any, long: tuple[list[int], list[int]]) -> None:
    prompts, expected = [*reference.prompts, long[0]], [*reference.continuations, long[1]]
    params = [greedy(len(tokens)) for tokens in expected]
    driver.replays.clear()
    assert driver.tokens(prompts, params) == expected
    before = driver.scheduler.stats.hit_tokens
    assert driver.tokens(prompts, params) == expected
    hits = driver.scheduler.stats.hit_tokens - before
    assert hits >= 128 if run["cache"] == "radix" else hits == 0
    longer = [prompt + tokens[:8] for prompt, tokens in zip(reference.prompts, reference.continuations, strict=True)]
    assert driver.tokens(longer, greedy(8)) == [tokens[8:] for tokens in reference.continuations]
    if run["graph"]:
        assert (3, 4) in driver.replays
    else:
        assert not driver.replays


@pytest.mark.parametrize("run", runs_in_ci(), ids=run_id)
def test_greedy_tokens_equal_transformers(
    run: dict[str, Any],
    tiny: Callable[[str], Path],
    answers: Callable[[str], Any],
    long_answer: Callable[[str], Any],
) -> None:
    with start(run, tiny(run["name"])) as driver:
        check(driver, run, answers(run["name"]), long_answer(run["name"]))


@pytest.mark.slow
@pytest.mark.parametrize("graph", FACTORS["graph"])
@pytest.mark.parametrize("page_size", FACTORS["page_size"])
@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_greedy_tokens_equal_transformers_in_all_combinations(
    name: str,
    page_size: int,
    graph: int,
    tiny: Callable[[str], Path],
    answers: Callable[[str], Any],
    long_answer: Callable[[str], Any],
) -> None:
    """One engine per checkpoint, page size and graph setting, and on it one scheduler per setting of the others."""
    runs = all_with_one_rank(name, page_size, graph)
    with start({**runs[0], "chunk": max(FACTORS["chunk"])}, tiny(name)) as driver:
        for run in runs:
            driver.reschedule(**settings_of(run))
            check(driver, run, answers(name), long_answer(name))


@pytest.mark.slow
@pytest.mark.parametrize("run", all_with_two_ranks(), ids=run_id)
def test_greedy_tokens_equal_transformers_in_all_combinations_with_two_ranks(
    run: dict[str, Any],
    tiny: Callable[[str], Path],
    answers: Callable[[str], Any],
    long_answer: Callable[[str], Any],
) -> None:
    with start(run, tiny(run["name"])) as driver:
        check(driver, run, answers(run["name"]), long_answer(run["name"]))


def test_the_set_for_ci_is_small_and_leaves_no_checkpoint_out(checkpoints: Any) -> None:
    runs = runs_in_ci()
    assert len(runs) <= MAX_RUNS
    assert len({ident(run) for run in runs}) == len(runs)
    assert {run["name"] for run in runs} == set(checkpoints.RECIPES)


def test_experts_in_one_tensor_are_cut_between_ranks(
    tiny: Callable[[str], Path], answers: Callable[[str], Any]
) -> None:
    reference = answers("moe-fused")
    found = []
    for tp in (1, 2):
        with Driver(tiny("moe-fused"), tp=tp, page_size=16, num_page_override=64) as driver:
            found.append(driver.tokens(reference.prompts, greedy(len(reference.continuations[0]))))
    assert found == [reference.continuations] * 2
