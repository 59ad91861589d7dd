"""Rows with a grammar: each token is sampled under the mask of all tokens before it, and no other row waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from minisgl_core.plugin_api import Grammar
from minisgl_core.scheduler import Abort, RemoteGrammars
from minisgl_core.testing.stub_engine import allowed_token, expected_tokens, next_token
from support.constrained import EVEN, Evens
from support.served import VOCAB, Answer, assert_idle, make_scheduler, new_req, prompt_of, serve

END = VOCAB - 1


def even_tokens(prompt: Sequence[int], count: int, length: int | None = None) -> list[int]:
    """The answer under :class:`Evens`, without a scheduler."""
    state, sequence = Evens(VOCAB, END, length).answer(new_req(0, [1], grammar=EVEN).params), list(prompt)
    while len(sequence) < len(prompt) + count and not state.finished:
        sequence.append(allowed_token(next_token(sequence, VOCAB), state, VOCAB))
        state.accept(sequence[-1])
    return sequence[len(prompt) :]


def test_only_the_rows_with_a_grammar_follow_it(overlap: bool) -> None:
    engine, scheduler = make_scheduler(Evens(VOCAB, END))
    prompts = [prompt_of(5, seed) for seed in range(4)]
    messages = [new_req(uid, prompt, max_tokens=9, **own(uid)) for uid, prompt in enumerate(prompts)]
    answers = serve(scheduler, messages)
    for uid, prompt in enumerate(prompts):
        expected = even_tokens(prompt, 9) if uid % 2 else expected_tokens(prompt, 9, VOCAB)
        assert (answers[uid].tokens, answers[uid].finish_reason) == (expected, "length")
    assert_idle(scheduler, engine)


def own(uid: int) -> dict[str, Any]:
    """Every second request has a grammar."""
    return {"grammar": EVEN} if uid % 2 else {}


def test_no_pass_waits_for_the_mask_of_a_row(overlap: bool) -> None:
    engine, scheduler = make_scheduler(Evens(VOCAB, END))
    assert scheduler.stats.grammar_s == 0.5, "what the grammars say"
    launch, behind = engine.launch, set()

    def noted(batch: Any, mode: Any) -> Any:
        if batch.is_decode:
            behind.update(req.device_len - req.num_tokens for req in batch.reqs)
        return launch(batch, mode)

    engine.launch = noted  # type: ignore[method-assign]
    serve(scheduler, [new_req(0, [1, 2, 3], grammar=EVEN), new_req(1, [1, 2])])
    assert behind == {1 if overlap else 0}


def test_a_complete_answer_ends_and_its_tokens_all_count(overlap: bool) -> None:
    engine, scheduler = make_scheduler(Evens(VOCAB, END, length=6))
    prompts = [prompt_of(5, seed) for seed in range(3)]
    counts = [30, 6, 5]
    messages = [new_req(uid, prompts[uid], max_tokens=counts[uid], grammar=EVEN) for uid in range(3)]
    answers = serve(scheduler, messages)
    assert [len(answers[uid].tokens) for uid in range(3)] == [6, 6, 5]
    assert [answers[uid].tokens for uid in range(3)] == [even_tokens(prompts[uid], counts[uid], 6) for uid in range(3)]
    assert [answers[uid].finish_reason for uid in range(3)] == ["stop", "stop", "length"]
    assert_idle(scheduler, engine)


@pytest.mark.parametrize("max_prefill_tokens", [3, 1000])
def test_a_preempted_answer_goes_on_with_its_state(overlap: bool, max_prefill_tokens: int) -> None:
    grammars = Evens(VOCAB, END, length=60)
    engine, scheduler = make_scheduler(
        grammars, num_pages=100, max_running_req=4, max_prefill_tokens=max_prefill_tokens
    )
    prompts = [prompt_of(8, uid) for uid in range(4)]
    answers = serve(scheduler, [new_req(uid, p, max_tokens=70, **own(uid)) for uid, p in enumerate(prompts)])
    assert scheduler.stats.preemptions > 0 and len(grammars.matchers) == 2
    for uid, prompt in enumerate(prompts):
        expected = even_tokens(prompt, 70, 60) if uid % 2 else expected_tokens(prompt, 70, VOCAB)
        assert answers[uid].tokens == expected
    assert [matcher.accepted for matcher in grammars.matchers] == [answers[1].tokens, answers[3].tokens]
    assert_idle(scheduler, engine)


def test_a_token_that_the_grammar_refuses_ends_its_request_alone(overlap: bool) -> None:
    engine, scheduler = make_scheduler(Evens(VOCAB, END, fails_at=3))
    answers = serve(scheduler, [new_req(0, [1, 2, 3], max_tokens=20, grammar=EVEN), new_req(1, [1, 2], max_tokens=20)])
    assert answers[0].finish_reason == "error" and "does not continue the grammar" in str(answers[0].error)
    assert answers[1] == Answer(expected_tokens([1, 2], 20, VOCAB), "length", logprobs=[None] * 20)
    assert_idle(scheduler, engine)


def test_a_grammar_without_a_first_token_ends_its_request_before_any_token() -> None:
    engine, scheduler = make_scheduler(Evens(VOCAB, END))
    answers = serve(scheduler, [new_req(0, [1, 2, 3], grammar=Grammar.regex("other")), new_req(1, [1, 2])])
    assert answers[0] == Answer([], "error", "no token begins such an answer")
    assert answers[1].tokens == expected_tokens([1, 2], 5, VOCAB)
    assert_idle(scheduler, engine)


def test_each_choice_has_a_state_of_its_own_and_an_aborted_one_accepts_nothing_more(overlap: bool) -> None:
    grammars = Evens(VOCAB, END)
    engine, scheduler = make_scheduler(grammars)
    scheduler.apply([new_req(0, [1, 2, 3], max_tokens=20, n=3, grammar=EVEN)])
    tokens: dict[int, list[int]] = {uid: [] for uid in range(3)}
    while scheduler.has_work:
        for out in scheduler.step():
            tokens[out.uid] += [] if out.token is None else [out.token]
        scheduler.apply(scheduler.take_notices())
        if len(tokens[1]) == 4:
            scheduler.apply([Abort(1)])
    assert tokens == {uid: even_tokens([1, 2, 3], 4 if uid == 1 else 20) for uid in range(3)}
    assert [matcher.accepted for matcher in grammars.matchers] == list(tokens.values())
    assert_idle(scheduler, engine)


def test_ranks_without_states_launch_the_same_batches(overlap: bool) -> None:
    """Both get rank 0's messages. The second one's tokens are the first one's, as an all-gather of logits has it."""
    engine, scheduler = make_scheduler(Evens(VOCAB, END, length=6), num_pages=60, max_running_req=3)
    other, follower = make_scheduler(RemoteGrammars(), num_pages=60, max_running_req=3)
    finish, sent = engine.finish, []

    def send(batch: Any, step: Any) -> Any:
        sent.append(finish(batch, step))
        return sent[-1]

    def receive(batch: Any, step: Any) -> Any:
        step.tokens = list(sent.pop().tokens)
        for req, token in zip(batch.reqs, step.tokens, strict=True):
            other.state.last_token[req.table_idx] = token
        return step

    engine.finish, other.finish = send, receive  # type: ignore[method-assign]
    messages: list[Any] = [new_req(uid, prompt_of(8, uid), max_tokens=30, **own(uid)) for uid in range(5)]
    while messages or scheduler.has_work:
        for each in (scheduler, follower):
            each.apply(messages)
        outs = list(scheduler.step())
        assert sorted(out.uid for out in follower.step()) == sorted(out.uid for out in outs)
        messages = scheduler.take_notices()
    assert engine.seen == other.seen and not follower.take_notices()
    assert_idle(follower, other)


def test_without_grammars_a_request_with_one_is_refused() -> None:
    engine, scheduler = make_scheduler()
    answers = serve(scheduler, [new_req(0, [1, 2, 3], grammar=EVEN), new_req(1, [1, 2])])
    assert answers[0].finish_reason == "error" and "grammar" in str(answers[0].error)
    assert answers[1].tokens == expected_tokens([1, 2], 5, VOCAB)
    assert_idle(scheduler, engine)
