"""Any mixture of requests, arrivals, aborts and limits: every answer is the one the request would get alone, the books
balance after every step, everything ends, and all ranks launch the same batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl_core.core import SamplingParams
from minisgl_core.env import ENV
from minisgl_core.scheduler import Abort, Finish, Message, NewReq, Scheduler
from minisgl_core.testing import StubEngine, expected_tokens
from minisgl_core.testing.stub_engine import allowed_token, next_token
from support.constrained import EVEN, Evens, Remainder
from support.served import Answer

VOCAB = 12
"""Small, so that stop ids are often met."""


@dataclass
class Case:
    engine: dict[str, Any]
    requests: list[NewReq]
    arrivals: list[int]
    """The step before which each request arrives."""
    cancels: list[tuple[int, int, bool]]
    """(step, uid, finish instead of abort)"""
    overlap: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page_size = draw(st.sampled_from([1, 2, 4]))
    engine = {
        "page_size": page_size,
        "num_pages": draw(st.integers(8, 100)) // page_size + 1,
        "max_seq_len": draw(st.sampled_from([16, 61, 100])),
        "max_running_req": draw(st.integers(1, 5)),
        "max_prefill_tokens": draw(st.sampled_from([1, 3, 8, 100])),
        "eos_token_ids": frozenset(draw(st.sets(st.integers(0, VOCAB - 1), max_size=1))),
        "cache": draw(st.sampled_from(["radix", "radix", "naive"])),
        "vocab_size": VOCAB,
    }
    requests = []
    for uid in range(draw(st.integers(1, 8))):
        shared = [1, 2, 3, 4, 5, 6, 7, 8, 9][: draw(st.integers(0, 9))]
        prompt = shared + draw(st.lists(st.integers(0, 2), max_size=8))
        params = SamplingParams(
            max_tokens=draw(st.integers(1, 60)),
            ignore_eos=draw(st.sampled_from([True, True, False])),
            stop_token_ids=draw(st.sampled_from([(), (), (), (3,), (5, 7)])),
            presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.0, 1.0])),
            grammar=draw(st.sampled_from([None, None, None, EVEN])),
        )
        requests.append(NewReq(uid, np.array(prompt, dtype=np.int32), params))
    steps = st.integers(0, 30)
    return Case(
        engine,
        requests,
        [draw(steps) for _ in requests],
        draw(st.lists(st.tuples(steps, st.integers(0, len(requests) - 1), st.booleans()), max_size=3)),
        draw(st.booleans()),
    )


def messages_of(case: Case, step: int) -> list[Message]:
    messages: list[Message] = [new for new, at in zip(case.requests, case.arrivals, strict=True) if at == step]
    return messages + [Finish(uid) if finish else Abort(uid) for at, uid, finish in case.cancels if at == step]


def play(case: Case) -> tuple[StubEngine, Scheduler, dict[int, Answer]]:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = not case.overlap
    try:
        engine = StubEngine(**case.engine)
        scheduler = Scheduler(engine, grammars=Evens(VOCAB, VOCAB - 1))
    finally:
        ENV.DISABLE_OVERLAP_SCHEDULING.reset()
    answers: dict[int, Answer] = {}
    for step in range(3000):
        scheduler.apply(messages_of(case, step))
        if step > 30 and not scheduler.has_work:
            break
        for out in scheduler.step():
            answers.setdefault(out.uid, Answer()).add(out)
        assert not scheduler.take_notices(), "no answer is complete or refused"
    assert not scheduler.has_work, f"not done: {scheduler.stats}"
    assert scheduler.stats.free_pages + scheduler.stats.cached_pages == engine.num_pages
    scheduler.clear_cache()
    assert scheduler.stats.free_pages == engine.num_pages
    return engine, scheduler, answers


def even_tokens(prompt: list[int], count: int, vocab_size: int, stop_ids: frozenset[int]) -> list[int]:
    """:func:`expected_tokens` of a request with the grammar ``EVEN``."""
    state, answer = Remainder(vocab_size, [vocab_size - 1], None), list[int]()
    while len(answer) < count and not (answer and answer[-1] in stop_ids):
        answer.append(allowed_token(next_token([*prompt, *answer], vocab_size), state, vocab_size))
    return answer


def check_answer(case: Case, new: NewReq, answer: Answer) -> None:
    prompt = new.input_ids.tolist()
    limit = min(case.engine["max_seq_len"], case.engine["num_pages"] * case.engine["page_size"])
    if not 0 < len(prompt) < limit:
        assert (answer.tokens, answer.finish_reason) == ([], "error")
        return
    stop_ids = frozenset(new.params.stop_token_ids)
    if not new.params.ignore_eos:
        stop_ids |= case.engine["eos_token_ids"]
    count = min(new.params.max_tokens, limit - len(prompt))
    alone = (even_tokens if new.params.grammar else expected_tokens)(prompt, count, VOCAB, stop_ids)
    cancelled = any(uid == new.uid for _, uid, _ in case.cancels)
    if cancelled and len(answer.tokens) < len(alone):
        assert answer.tokens == alone[: len(answer.tokens)]
        assert answer.finish_reason in ("abort", "stop")
    else:
        assert answer.tokens == alone
        if not cancelled:
            assert answer.finish_reason == ("stop" if alone[-1] in stop_ids else "length")


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_every_answer_is_the_one_of_a_solo_run(case: Case) -> None:
    engine, _, answers = play(case)
    for new, arrival in zip(case.requests, case.arrivals, strict=True):
        if new.uid in answers:
            check_answer(case, new, answers[new.uid])
        else:
            assert any(uid == new.uid and at >= arrival for at, uid, _ in case.cancels), "no answer at all"
    for phase, rows in engine.seen:
        new_tokens = sum(after - before for _, before, after in rows)
        assert new_tokens <= (case.engine["max_prefill_tokens"] if phase == "prefill" else len(rows))
        assert len(rows) <= case.engine["max_running_req"]


def small_pool(seed: int) -> Case:
    """Long answers in a pool for two of them at most, so that Reqs are preempted again and again."""
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 2, 4]))
    engine = {"page_size": page_size, "num_pages": 100 // page_size, "max_running_req": 6, "vocab_size": VOCAB}
    engine |= {"max_seq_len": 90, "max_prefill_tokens": int(rng.choice([3, 50])), "eos_token_ids": frozenset[int]()}
    requests = [
        NewReq(uid, rng.integers(0, 2, int(rng.integers(1, 20)), dtype=np.int32), SamplingParams(max_tokens=60))
        for uid in range(6)
    ]
    cancels = [(int(rng.integers(20, 120)), int(rng.integers(6)), bool(rng.integers(2))) for _ in range(2)]
    return Case(engine, requests, rng.integers(0, 20, 6).tolist(), cancels, overlap=bool(seed % 2))


@pytest.mark.parametrize("seed", range(20))
def test_preempted_requests_end_with_the_answer_of_a_solo_run(seed: int) -> None:
    case = small_pool(seed)
    _, scheduler, answers = play(case)
    for new in case.requests:
        check_answer(case, new, answers[new.uid])
    assert scheduler.stats.preemptions > 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_case_44_ranks_launch_the_same_batches(case: Case) -> None:
    (first, _, said_first), (second, _, said_second) = play(case), play(case)
    assert first.seen == second.seen
    assert said_first == said_second
    assert np.array_equal(first.kv, second.kv)
