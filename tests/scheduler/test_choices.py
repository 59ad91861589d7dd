"""Several answers to one prompt, and what is said about the prompt itself."""

from __future__ import annotations

import pytest

from minisgl_core.errors import EngineError
from minisgl_core.scheduler import Abort, Finish, Message, PromptOut, Scheduler
from minisgl_core.testing import StubEngine, expected_tokens
from support.served import VOCAB, Answer, make_scheduler, new_req, prompt_of


def run(scheduler: Scheduler, messages: list[Message]) -> tuple[dict[int, Answer], list[PromptOut]]:
    answers: dict[int, Answer] = {}
    prompts: list[PromptOut] = []
    scheduler.apply(messages)
    while scheduler.has_work:
        outs = scheduler.step()
        for out in outs:
            answers.setdefault(out.uid, Answer()).add(out)
        prompts += [part for part in outs.parts if isinstance(part, PromptOut)]
    return answers, prompts


def computed(engine: StubEngine) -> int:
    """Tokens of all prefill passes."""
    return sum(after - before for phase, rows in engine.seen if phase == "prefill" for _, before, after in rows)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [7, 8192])
def test_choices_compute_the_prompts_pages_once(overlap: bool, page_size: int, chunk: int) -> None:
    engine, scheduler = make_scheduler(num_pages=256 // page_size, page_size=page_size, max_prefill_tokens=chunk)
    prompt = prompt_of(37)
    answers, prompts = run(scheduler, [new_req(3, prompt, n=5), new_req(20, prompt_of(9, 1))])
    assert {uid: answer.tokens for uid, answer in answers.items()} == {
        **dict.fromkeys(range(3, 8), expected_tokens(prompt, 5, VOCAB)),
        20: expected_tokens(prompt_of(9, 1), 5, VOCAB),
    }
    shared = 36 // page_size * page_size  # whole pages, and never a prompt's last token
    assert computed(engine) == 37 + 4 * (37 - shared) + 9
    assert prompts == [PromptOut(3, 0), PromptOut(20, 0)]


def test_more_choices_than_rows_wait_their_turn(overlap: bool) -> None:
    engine, scheduler = make_scheduler(max_running_req=2)
    answers, _ = run(scheduler, [new_req(0, prompt_of(12), n=7)])
    assert [answers[uid].tokens for uid in range(7)] == [expected_tokens(prompt_of(12), 5, VOCAB)] * 7
    assert computed(engine) == 12 + 6


def test_abort_of_a_request_ends_all_its_choices_and_no_other(overlap: bool) -> None:
    _, scheduler = make_scheduler(max_running_req=4)
    scheduler.apply([new_req(0, prompt_of(9), n=6, max_tokens=50), new_req(6, prompt_of(9), max_tokens=8)])
    answers = {uid: Answer() for uid in range(7)}
    for _ in range(4):
        for out in scheduler.step():
            answers[out.uid].add(out)
    ended, _ = run(scheduler, [Finish(1), Abort(0, 6)])
    reasons = {uid: answer.finish_reason for uid, answer in ended.items()}
    assert reasons == {0: "abort", 1: "stop", 2: "abort", 3: "abort", 4: "abort", 5: "abort", 6: "length"}
    scheduler.check_integrity()


def test_a_refused_request_is_refused_for_every_choice() -> None:
    _, scheduler = make_scheduler()
    answers, prompts = run(scheduler, [new_req(0, prompt_of(500), n=3)])
    assert {uid: answer.finish_reason for uid, answer in answers.items()} == dict.fromkeys(range(3), "error")
    assert prompts == []


def test_every_choices_uid_must_be_free() -> None:
    _, scheduler = make_scheduler()
    scheduler.apply([new_req(2, prompt_of(4))])
    with pytest.raises(EngineError, match="uid 2"):
        scheduler.apply([new_req(0, prompt_of(4), n=3)])


def test_cached_tokens_are_those_of_the_first_admission(overlap: bool) -> None:
    """Twenty pages for two Reqs that grow to 14 each: the younger is preempted, and finds its own pages again."""
    _, scheduler = make_scheduler(page_size=4, num_pages=20)
    _, first = run(scheduler, [new_req(0, prompt_of(16), max_tokens=1)])
    assert first == [PromptOut(0, 0)]
    answers, prompts = run(
        scheduler, [new_req(1, prompt_of(14), max_tokens=42), new_req(2, prompt_of(16, 1), max_tokens=40)]
    )
    assert scheduler.stats.preemptions
    assert prompts == [PromptOut(1, 12), PromptOut(2, 0)]
    assert answers[2].tokens == expected_tokens(prompt_of(16, 1), 40, VOCAB)


def test_none_as_max_tokens_goes_to_the_end_of_the_context(overlap: bool) -> None:
    _, scheduler = make_scheduler(max_seq_len=40, num_pages=100)
    answers, _ = run(scheduler, [new_req(0, prompt_of(9), max_tokens=None)])
    assert (len(answers[0].tokens), answers[0].finish_reason) == (31, "length")
