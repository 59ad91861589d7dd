"""The scheduler on the stub engine, whose tokens depend on everything that the page table says is in the pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minisgl_core.core import Req
from minisgl_core.env import ENV
from minisgl_core.errors import EngineError
from minisgl_core.scheduler import Abort, Finish, PromptOut, TokenOut, TokenRun
from minisgl_core.testing import expected_tokens
from support.served import VOCAB, assert_idle, make_scheduler, new_req, prompt_of, serve

# ---- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_answers_do_not_depend_on_company(overlap: bool, page_size: int, cache: str) -> None:
    engine, scheduler = make_scheduler(
        num_pages=256 // page_size, page_size=page_size, cache=cache, max_prefill_tokens=20
    )
    prompts = [prompt_of(3 + 5 * uid, seed=uid % 3) for uid in range(12)]
    answers = serve(scheduler, [new_req(uid, prompt, max_tokens=3 + uid) for uid, prompt in enumerate(prompts)])
    for uid, prompt in enumerate(prompts):
        assert answers[uid].tokens == expected_tokens(prompt, 3 + uid, VOCAB)
        assert answers[uid].finish_reason == "length"
    assert_idle(scheduler, engine)


@pytest.mark.parametrize("length", [16, 32, 48])
def test_case_17_whole_prompt_cached(overlap: bool, length: int) -> None:
    engine, scheduler = make_scheduler(page_size=16)
    for uid in range(3):
        answers = serve(scheduler, [new_req(uid, prompt_of(length))])
        assert answers[uid].tokens == expected_tokens(prompt_of(length), 5, VOCAB)
    prefills = [rows[0] for phase, rows in engine.seen if phase == "prefill"]
    assert [(before, after) for _, before, after in prefills] == [(0, length), *[(length - 16, length)] * 2]


def test_case_22_a_reused_table_row_does_not_change_a_cached_prefix(overlap: bool) -> None:
    _, scheduler = make_scheduler(max_running_req=1)
    first, other = prompt_of(20, 1), prompt_of(24, 2)
    runs = [serve(scheduler, [new_req(uid, prompt)])[uid].tokens for uid, prompt in enumerate([first, other, first])]
    assert runs[0] == runs[2] == expected_tokens(first, 5, VOCAB)
    assert scheduler.stats.hit_tokens == 19


@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_case_24_one_prompt_four_times_one_answer(overlap: bool, cache: str) -> None:
    _, scheduler = make_scheduler(num_pages=200, page_size=8, max_seq_len=1500, cache=cache, max_prefill_tokens=512)
    prompt = prompt_of(1464)
    answers = [serve(scheduler, [new_req(uid, prompt)])[uid].tokens for uid in range(4)]
    assert answers == [expected_tokens(prompt, 5, VOCAB)] * 4
    assert scheduler.stats.hit_tokens == (3 * 1456 if cache == "radix" else 0)


def test_requests_of_one_batch_share_their_prefix(overlap: bool) -> None:
    engine, scheduler = make_scheduler(num_pages=64, page_size=4, max_prefill_tokens=1000)
    prefix = prompt_of(40)
    prompts = [prefix + prompt_of(5, seed) for seed in range(1, 6)]
    answers = serve(scheduler, [new_req(uid, prompt) for uid, prompt in enumerate(prompts)])
    assert all(answers[uid].tokens == expected_tokens(prompt, 5, VOCAB) for uid, prompt in enumerate(prompts))
    phase, rows = engine.seen[0]
    assert phase == "prefill"
    assert [before for _, before, _ in rows] == [0, 40, 40, 40, 40]


@pytest.mark.parametrize("chunk", [1, 255, 256, 257, 999])
def test_case_26_chunk_size_does_not_matter(overlap: bool, chunk: int) -> None:
    ENV.CHECK_INTEGRITY.value = chunk > 1  # a thousand checks of a thousand nodes take seconds
    engine, scheduler = make_scheduler(num_pages=1100, max_seq_len=1024, max_prefill_tokens=chunk)
    prompt = prompt_of(1000)
    assert serve(scheduler, [new_req(0, prompt)])[0].tokens == expected_tokens(prompt, 5, VOCAB)
    passes = [rows[0][1:] for phase, rows in engine.seen if phase == "prefill"]
    assert passes == [(start, min(start + chunk, 1000)) for start in range(0, 1000, chunk)]


def test_case_27_tokens_of_unfinished_chunks_do_not_leak(overlap: bool) -> None:
    engine, scheduler = make_scheduler(max_prefill_tokens=16)
    prompt = prompt_of(40)
    message = new_req(0, prompt, max_tokens=7)
    answer = serve(scheduler, [message])[0]
    assert len(answer.tokens) == 7
    assert answer.tokens == expected_tokens(prompt, 7, VOCAB)
    assert message.input_ids.tolist() == prompt
    assert [rows for phase, rows in engine.seen if phase == "prefill"] == [[(0, 0, 16)], [(0, 16, 32)], [(0, 32, 40)]]


def test_case_29_no_prefill_pass_exceeds_the_budget(overlap: bool) -> None:
    engine, scheduler = make_scheduler(num_pages=2000, max_prefill_tokens=128, max_running_req=16)
    prompts = [prompt_of(100, uid) for uid in range(10)]
    answers = serve(scheduler, [new_req(uid, prompt) for uid, prompt in enumerate(prompts)])
    assert all(answers[uid].tokens == expected_tokens(prompt, 5, VOCAB) for uid, prompt in enumerate(prompts))
    sizes = [sum(after - before for _, before, after in rows) for phase, rows in engine.seen if phase == "prefill"]
    assert sizes == [128] * 7 + [104]


def test_a_stream_of_prompts_does_not_silence_running_requests(overlap: bool) -> None:
    engine, scheduler = make_scheduler(num_pages=4000, max_running_req=64, max_prefill_tokens=10)
    scheduler.apply([new_req(0, prompt_of(10), max_tokens=20)])
    for uid in range(1, 60):
        scheduler.apply([new_req(uid, prompt_of(10, uid), max_tokens=1)])
        scheduler.step()
    decodes = [index for index, (phase, _) in enumerate(engine.seen) if phase == "decode"]
    assert decodes
    assert max(np.diff([0, *decodes])) <= 9


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pool", "expected"), [(50, 50), (200, 100)])
@pytest.mark.parametrize("page_size", [1, 10, 25])
def test_case_30_stops_at_context_or_pool(overlap: bool, pool: int, expected: int, page_size: int) -> None:
    engine, scheduler = make_scheduler(
        num_pages=pool // page_size, page_size=page_size, max_seq_len=100, eos_token_ids=frozenset(range(VOCAB))
    )
    answer = serve(scheduler, [new_req(0, prompt_of(7), max_tokens=1000, ignore_eos=True)])[0]
    assert (len(answer.tokens) + 7, answer.finish_reason) == (expected, "length")
    assert answer.tokens == expected_tokens(prompt_of(7), expected - 7, VOCAB)
    assert_idle(scheduler, engine)


def test_case_31_prompts_around_the_context(overlap: bool) -> None:
    engine, scheduler = make_scheduler(max_seq_len=64, num_pages=1000)
    scheduler.apply([new_req(9, prompt_of(10), max_tokens=30)])
    before = [out.token for out in scheduler.step()]
    answers = serve(scheduler, [new_req(n, prompt_of(n), max_tokens=5) for n in (63, 64, 65, 6500)])
    assert (answers[63].tokens, answers[63].finish_reason) == (expected_tokens(prompt_of(63), 1, VOCAB), "length")
    for n in (64, 65, 6500):
        assert answers[n].finish_reason == "error"
        assert answers[n].error is not None
        assert f"prompt of {n} tokens" in answers[n].error
        assert "64 tokens" in answers[n].error
    assert before + answers[9].tokens == expected_tokens(prompt_of(10), 30, VOCAB)
    assert_idle(scheduler, engine)


def test_a_refusal_comes_with_the_very_next_step() -> None:
    _, scheduler = make_scheduler(max_seq_len=64)
    scheduler.apply([new_req(0, prompt_of(64))])
    assert [out.finish_reason for out in scheduler.step()] == ["error"]
    assert not scheduler.has_work


@pytest.mark.parametrize("given", [{"stop_token_ids": [3, VOCAB]}, {"logit_bias": {VOCAB: 1.0}}])
def test_token_ids_that_the_model_does_not_have_are_refused(given: dict[str, Any]) -> None:
    engine, scheduler = make_scheduler()
    answers = serve(scheduler, [new_req(0, prompt_of(4), max_tokens=3), new_req(1, prompt_of(4), **given)])
    assert (answers[0].tokens, answers[1].tokens) == (expected_tokens(prompt_of(4), 3, VOCAB), [])
    assert answers[1].finish_reason == "error"
    assert f"`{next(iter(given))}` names token id {VOCAB}; this model's ids go from 0 to {VOCAB - 1}" in (
        answers[1].error or ""
    )
    assert_idle(scheduler, engine)


def test_case_33_max_tokens_is_capped_at_what_is_left(overlap: bool) -> None:
    _, scheduler = make_scheduler(max_seq_len=128, num_pages=200)
    answer = serve(scheduler, [new_req(0, prompt_of(100), max_tokens=200)])[0]
    assert (len(answer.tokens), answer.finish_reason) == (28, "length")


def test_case_34_refused_requests_leave_the_pool_empty(overlap: bool) -> None:
    engine, scheduler = make_scheduler()
    answers = serve(scheduler, [new_req(uid, prompt_of(500)) for uid in range(20)])
    assert [answer.finish_reason for answer in answers.values()] == ["error"] * 20
    assert scheduler.stats.free_pages == engine.num_pages
    assert engine.seen == []


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "the prompt is empty"), ([1, VOCAB], "token id 50"), ([-1, 3], "token id -1")]
)
def test_case_35_prompts_that_cannot_be_served(prompt: list[int], message: str) -> None:
    _, scheduler = make_scheduler()
    answers = serve(scheduler, [new_req(0, prompt), new_req(1, [3, 4])])
    assert answers[0].finish_reason == "error"
    assert message in (answers[0].error or "")
    assert answers[1].tokens == expected_tokens([3, 4], 5, VOCAB)


def test_case_36_one_token(overlap: bool) -> None:
    engine, scheduler = make_scheduler()
    answer = serve(scheduler, [new_req(0, [1, 2, 3], max_tokens=1)])[0]
    assert (answer.tokens, answer.finish_reason) == (expected_tokens([1, 2, 3], 1, VOCAB), "length")
    assert [phase for phase, _ in engine.seen] == ["prefill"]


def test_two_live_requests_of_one_uid_are_our_own_mistake() -> None:
    _, scheduler = make_scheduler()
    scheduler.apply([new_req(0, [1])])
    with pytest.raises(EngineError, match="uid 0 is in use"):
        scheduler.apply([new_req(0, [2])])


# ---- the end of a request --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [4, 100])
def test_case_37_eos_first(overlap: bool, chunk: int) -> None:
    engine, scheduler = make_scheduler(num_pages=400, max_prefill_tokens=chunk, eos_token_ids=frozenset(range(VOCAB)))
    answers = serve(scheduler, [new_req(uid, prompt_of(1 + uid % 13, uid)) for uid in range(100)])
    for uid in range(100):
        assert answers[uid].tokens == expected_tokens(prompt_of(1 + uid % 13, uid), 1, VOCAB)
        assert answers[uid].finish_reason == "stop"
    assert_idle(scheduler, engine)


def test_stop_ids_of_model_and_user(overlap: bool) -> None:
    prompt = next([1, 2, n] for n in range(VOCAB) if len(set(expected_tokens([1, 2, n], 12, VOCAB))) == 12)
    free = expected_tokens(prompt, 12, VOCAB)
    _, scheduler = make_scheduler(eos_token_ids=frozenset([free[5], free[8], 10**6]))  # a tokenizer may have more ids
    answers = serve(
        scheduler,
        [
            new_req(0, prompt, max_tokens=12),
            new_req(1, prompt, max_tokens=12, ignore_eos=True),
            new_req(2, prompt, max_tokens=12, ignore_eos=True, stop_token_ids=[free[8]]),
            new_req(3, prompt, max_tokens=12, stop_token_ids=[free[2]]),
            new_req(4, prompt, max_tokens=6),
            new_req(5, prompt, max_tokens=12, stop_token_ids=[free[5]]),  # the model's own as well
        ],
    )
    ends = {uid: (len(answer.tokens), answer.finish_reason, answer.stop_reason) for uid, answer in answers.items()}
    assert ends == {
        0: (6, "stop", None),
        1: (12, "length", None),
        2: (9, "stop", free[8]),
        3: (3, "stop", free[2]),
        4: (6, "stop", None),
        5: (6, "stop", None),
    }
    assert all(answer.tokens == free[: len(answer.tokens)] for answer in answers.values())


def test_abort_in_every_state(overlap: bool) -> None:
    engine, scheduler = make_scheduler(max_running_req=2, max_prefill_tokens=8)
    scheduler.apply(
        [new_req(0, prompt_of(4, 0), max_tokens=40), new_req(1, prompt_of(30, 1)), new_req(2, prompt_of(4, 2))]
    )
    outs = [*scheduler.step(), *scheduler.step()]  # 0 runs, 1 is half prefilled, 2 waits
    scheduler.apply([Abort(2), Abort(1), Abort(0), Abort(77)])
    outs += [*scheduler.step(), *scheduler.step()]
    assert {out.uid: out.finish_reason for out in outs if out.finish_reason} == {0: "abort", 1: "abort", 2: "abort"}
    assert [out.token for out in outs if out.token is not None] in ([], expected_tokens(prompt_of(4, 0), 1, VOCAB))
    assert_idle(scheduler, engine)


def test_an_abort_of_the_blocked_head_lets_the_next_one_in(overlap: bool) -> None:
    """The head wants more pages than are left; behind it waits one that fits. Nothing else ends meanwhile."""
    _, scheduler = make_scheduler(num_pages=60)
    scheduler.apply(
        [new_req(0, prompt_of(10, 0), max_tokens=30), new_req(1, prompt_of(50, 1)), new_req(2, prompt_of(4, 2))]
    )
    early = [out.uid for _ in range(4) for out in scheduler.step()]
    assert set(early) == {0}
    scheduler.apply([Abort(1)])
    later = [out for _ in range(4) for out in scheduler.step()]
    assert expected_tokens(prompt_of(4, 2), 5, VOCAB)[:2] == [out.token for out in later if out.uid == 2][:2]
    assert not any(out.finish_reason for out in later if out.uid == 0)


def test_finish_ends_with_stop_and_drops_the_token_under_way(overlap: bool) -> None:
    engine, scheduler = make_scheduler()
    scheduler.apply([new_req(0, [1, 2], max_tokens=50), new_req(1, [3, 4], max_tokens=8)])
    tokens: list[int] = []
    while len(tokens) < 3:
        tokens += [out.token for out in scheduler.step() if out.uid == 0 and out.token is not None]
    answers = serve(scheduler, [Finish(0)])
    assert (answers[0].tokens, answers[0].finish_reason) == ([], "stop")
    assert answers[1].finish_reason == "length"
    assert_idle(scheduler, engine)


@pytest.mark.parametrize("step", [0, 3])
def test_case_45_nan_logits_end_one_request_only(overlap: bool, step: int) -> None:
    def nan_at(req: Req, position: int) -> bool:
        return req.uid == 1 and position == 10 + step

    engine, scheduler = make_scheduler(page_size=2, nan_at=nan_at)
    prompts = [prompt_of(10, uid) for uid in range(3)]
    answers = serve(scheduler, [new_req(uid, prompt, max_tokens=9) for uid, prompt in enumerate(prompts)])
    assert answers[1].tokens == expected_tokens(prompts[1], step, VOCAB)
    assert answers[1].finish_reason == "error"
    assert (answers[1].error or "").startswith("the model's logits for this request were NaN; with dtype=float16 try")
    for uid in (0, 2):
        assert answers[uid].tokens == expected_tokens(prompts[uid], 9, VOCAB)
    assert_idle(scheduler, engine)
    hits = scheduler.stats.hit_tokens
    assert serve(scheduler, [new_req(7, prompts[1])])[7].tokens == expected_tokens(prompts[1], 5, VOCAB)
    assert scheduler.stats.hit_tokens == hits, "nothing of the failed request stayed in the prefix cache"


def test_nan_in_an_unfinished_chunk_ends_the_request(overlap: bool) -> None:
    engine, scheduler = make_scheduler(max_prefill_tokens=4, nan_at=lambda req, position: req.uid == 0)
    answers = serve(scheduler, [new_req(0, prompt_of(20)), new_req(1, prompt_of(6, 1))])
    assert (answers[0].tokens, answers[0].finish_reason) == ([], "error")
    assert answers[1].tokens == expected_tokens(prompt_of(6, 1), 5, VOCAB)
    assert_idle(scheduler, engine)


def test_logprobs_travel_with_their_token(overlap: bool) -> None:
    _, scheduler = make_scheduler()
    answers = serve(scheduler, [new_req(0, [1, 2], logprobs=1), new_req(1, [3, 4])])
    assert [entry.token for entry in answers[0].logprobs if entry] == answers[0].tokens
    assert answers[1].logprobs == [None] * 5


def test_a_steps_parts_say_what_its_iteration_says() -> None:
    _, scheduler = make_scheduler()
    scheduler.apply([new_req(0, [1, 2], max_tokens=3), new_req(1, [3, 4], max_tokens=9), new_req(2, prompt_of(200))])
    kinds: set[type] = set()
    while scheduler.has_work:
        outs = scheduler.step()
        listed = [
            out
            for part in outs.parts
            if not isinstance(part, PromptOut)
            for out in (map(TokenOut, part.uids, part.tokens) if isinstance(part, TokenRun) else [part])
        ]
        assert list(outs) == listed
        kinds |= {type(part) for part in outs.parts}
    assert kinds == {PromptOut, TokenOut, TokenRun}
