"""Lookahead pages are allocated for many Reqs at once, and seldom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minisgl_core.core import SamplingParams
from minisgl_core.scheduler import NewReq, Scheduler
from minisgl_core.testing import StubEngine, expected_tokens
from support.served import VOCAB, new_req, prompt_of, serve


def make(**settings: Any) -> tuple[Scheduler, list[list[int]]]:
    """A scheduler, and the slots of each Req in every allocation that it will make for running Reqs."""
    engine, allocations = StubEngine(vocab_size=VOCAB, **settings), list[list[int]]()
    extend_slots = engine.state.extend_slots

    def spy(rows: Any, starts: Any, counts: Any, slots: Any) -> None:
        allocations.append(counts.tolist())
        extend_slots(rows, starts, counts, slots)

    engine.state.extend_slots = spy  # type: ignore[method-assign]
    return Scheduler(engine), allocations


@pytest.mark.parametrize("page_size", [1, 4])
def test_lookahead_is_at_least_16_tokens(page_size: int) -> None:
    scheduler, allocations = make(num_pages=1000, page_size=page_size, max_running_req=4)
    serve(scheduler, [new_req(uid, prompt_of(5, uid), max_tokens=100) for uid in range(4)])
    assert 1 <= len(allocations) <= 100 // 16
    assert all(len(counts) == 4 and min(counts) >= 16 for counts in allocations)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_rows_that_join_at_different_times_run_out_of_slots_together(page_size: int) -> None:
    scheduler, allocations = make(num_pages=4000, page_size=page_size, max_running_req=8, max_seq_len=400)
    tokens: dict[int, list[int]] = {uid: [] for uid in range(8)}
    for uid in range(8):
        scheduler.apply([new_req(uid, prompt_of(5, uid), max_tokens=300)])
        for _ in range(3):
            for out in scheduler.step():
                tokens[out.uid].append(out.token or 0)
    for uid, answer in serve(scheduler, []).items():
        assert tokens[uid] + answer.tokens == expected_tokens(prompt_of(5, uid), 300, VOCAB)
    rows = [len(counts) for counts in allocations]
    assert rows[:8] == [1] * 8, "each Req gets its own as it joins"
    assert 3 <= rows[8:].count(8) == len(rows) - 8 <= 300 // 32


def test_where_the_pool_cannot_give_64_tokens_to_all_it_gives_fewer() -> None:
    scheduler, allocations = make(num_pages=400, max_running_req=6)
    scheduler.apply([new_req(uid, prompt_of(5, uid), max_tokens=100) for uid in range(6)])
    tokens: dict[int, list[int]] = {uid: [] for uid in range(6)}
    while len(tokens[5]) < 40:
        for out in scheduler.step():
            tokens[out.uid].append(out.token or 0)
    assert all(found == expected_tokens(prompt_of(5, uid), len(found), VOCAB) for uid, found in tokens.items())
    assert allocations
    assert {count for counts in allocations for count in counts} <= set(range(16, 26))
    assert scheduler.stats.preemptions == 0


def test_when_all_requests_end_for_want_of_pages_the_next_one_starts(overlap: bool) -> None:
    vocab, prompts = 5000, [prompt_of(8, seed) for seed in range(2)]
    for count in range(40, 47):  # the pool is used up by the 43rd token of both
        scheduler = Scheduler(StubEngine(num_pages=100, vocab_size=vocab))
        answers = [expected_tokens(prompt, count, vocab) for prompt in prompts]
        both = [
            NewReq(uid, np.array(prompts[uid], dtype=np.int32), SamplingParams(max_tokens=80, stop_token_ids=[last]))
            for uid, (*_, last) in enumerate(answers)
        ]
        found = serve(scheduler, [*both, new_req(2, prompt_of(60, seed=2), max_tokens=5)])
        assert [found[uid].tokens for uid in range(2)] == answers
        assert len(found[2].tokens) == 5


@pytest.mark.parametrize("page_size", [1, 4])
def test_lookahead_is_taken_back_before_a_request_is_preempted(page_size: int, overlap: bool) -> None:
    """The first gets slots for 73 tokens of 100 while it is alone and ends at its 48th; the second uses 47."""
    vocab, prompts = 5000, [prompt_of(8, seed) for seed in range(2)]
    first = expected_tokens(prompts[0], 40, vocab)
    engine = StubEngine(num_pages=100 // page_size, page_size=page_size, vocab_size=vocab)
    scheduler = Scheduler(engine)
    params = SamplingParams(max_tokens=80, stop_token_ids=first[-1:])
    scheduler.apply([NewReq(0, np.array(prompts[0], dtype=np.int32), params)])
    began = [out.token for _ in range(3) for out in scheduler.step()]
    answers = serve(scheduler, [new_req(1, prompts[1], max_tokens=40)])
    assert began + answers[0].tokens == first
    assert answers[1].tokens == expected_tokens(prompts[1], 40, vocab)
    assert scheduler.stats.preemptions == 0
    both = [{uid for uid, _, _ in rows} for phase, rows in engine.seen if phase == "decode"].count({0, 1})
    assert both >= 36, "they ran together to the end of the first"


def test_lookahead_of_a_partial_prompt_is_taken_back(overlap: bool) -> None:
    """One token of a prompt of 200 is computed at a time, with 216 pages allocated; 79 are left for the running one,
    which needs three more before the prompt is done.
    """
    vocab, prompts = 5000, [prompt_of(8, 0), prompt_of(200, 1)]
    engine = StubEngine(num_pages=295, vocab_size=vocab, max_seq_len=400, max_prefill_tokens=1)
    scheduler = Scheduler(engine)
    scheduler.apply([new_req(0, prompts[0], max_tokens=75)])
    began: list[int | None] = []
    while len(began) < 52:
        began += [out.token for out in scheduler.step()]
    answers = serve(scheduler, [new_req(1, prompts[1], max_tokens=20)])
    assert began + answers[0].tokens == expected_tokens(prompts[0], 75, vocab)
    assert answers[1].tokens == expected_tokens(prompts[1], 20, vocab)
    assert scheduler.stats.preemptions == 0
