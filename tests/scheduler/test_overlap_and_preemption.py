"""Overlap of launching and processing, preemption, and the batch object of steady decode."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_core.scheduler import Abort
from minisgl_core.testing.stub_engine import StubEngine, expected_tokens
from support.served import VOCAB, assert_idle, make_scheduler, new_req, prompt_of, serve


class Launches:
    """Records, at each launch, how many tokens of each row the host knows."""

    def __init__(self, engine: StubEngine) -> None:
        self.known: list[int] = []
        self._launch = engine.launch
        engine.launch = self  # type: ignore[method-assign, assignment]

    def __call__(self, batch: Any, mode: Any) -> Any:
        if batch.is_decode:
            self.known += [req.device_len - req.num_tokens for req in batch.reqs]
        return self._launch(batch, mode)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.5},
        {"logprobs": 0},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 3},
    ],
)
def test_overlap_launches_before_it_processes_whatever_the_rows_need_of_the_host(
    overlap: bool, params: dict[str, Any]
) -> None:
    engine, scheduler = make_scheduler()
    launches = Launches(engine)
    answers = serve(scheduler, [new_req(0, [1, 2, 3], **params), new_req(1, [1, 2])])
    assert set(launches.known) == {1 if overlap else 0}
    assert answers[0].tokens == expected_tokens([1, 2, 3], 5, VOCAB)
    assert answers[1].tokens == expected_tokens([1, 2], 5, VOCAB)


def test_a_pass_is_finished_after_the_one_before_was_processed_and_before_the_next_is_launched() -> None:
    engine, scheduler = make_scheduler()
    order: list[str] = []
    for name in ("launch", "finish"):
        watch(engine, name, order)
    watch(scheduler, "_process", order)
    serve(scheduler, [new_req(0, [1, 2, 3], max_tokens=4, frequency_penalty=0.5), new_req(1, [1, 2], max_tokens=4)])
    steady = ["launch", "_process", "finish"]
    assert order == ["launch", "finish", *steady, *steady, *steady, "_process"]


def watch(thing: Any, name: str, order: list[str]) -> None:
    """Note each call of this method."""
    method = getattr(thing, name)

    def noted(*args: Any) -> Any:
        order.append(name)
        return method(*args)

    setattr(thing, name, noted)


@pytest.mark.parametrize("reason", ["stop", "abort", "nan", "length"])
def test_a_row_with_penalties_that_ends_while_its_next_pass_runs(overlap: bool, reason: str) -> None:
    """The pass is finished for it all the same, and its token is dropped."""
    prompt, stop = [1, 2, 3], expected_tokens([1, 2, 3], 3, VOCAB)[-1]
    engine, scheduler = make_scheduler(nan_at=lambda req, at: reason == "nan" and (req.uid, at) == (0, 5))
    own = {"stop_token_ids": [stop]} if reason == "stop" else {"max_tokens": 3} if reason == "length" else {}
    scheduler.apply([new_req(0, prompt, **{"max_tokens": 30, "presence_penalty": 0.1, **own})])
    scheduler.apply([new_req(1, [4, 5], max_tokens=30, repetition_penalty=1.1)])
    tokens: dict[int, list[int]] = {0: [], 1: []}
    ends = {}
    while scheduler.has_work:
        for out in scheduler.step():
            tokens[out.uid] += [] if out.token is None else [out.token]
            if out.finish_reason is not None:
                ends[out.uid] = out.finish_reason
        if reason == "abort" and len(tokens[0]) == 2 and 0 not in ends:
            scheduler.apply([Abort(0)])
    count = {"stop": 3, "abort": 2, "nan": 2, "length": 3}[reason]
    assert tokens == {0: expected_tokens(prompt, count, VOCAB), 1: expected_tokens([4, 5], 30, VOCAB)}
    assert ends == {0: "error" if reason == "nan" else reason, 1: "length"}
    assert_idle(scheduler, engine)


def test_preemption_keeps_tokens_and_lets_the_oldest_finish_first(overlap: bool) -> None:
    engine, scheduler = make_scheduler(num_pages=100, max_running_req=4)
    prompts = [prompt_of(8, uid) for uid in range(4)]
    answers = serve(scheduler, [new_req(uid, prompt, max_tokens=70) for uid, prompt in enumerate(prompts)])
    assert scheduler.stats.preemptions > 0
    for uid, prompt in enumerate(prompts):
        assert answers[uid].tokens == expected_tokens(prompt, 70, VOCAB)
    ends = [max(i for i, (_, rows) in enumerate(engine.seen) if uid in [row[0] for row in rows]) for uid in range(4)]
    assert ends == sorted(ends)
    assert_idle(scheduler, engine)


def test_a_preempted_request_does_not_count_its_own_tokens_as_prompt(overlap: bool) -> None:
    engine, scheduler = make_scheduler(num_pages=60, max_running_req=2)
    prompt_lens: set[tuple[int, int]] = set()
    launch = engine.launch

    def spy(batch: Any, mode: Any) -> Any:
        prompt_lens.update((req.uid, req.prompt_len) for req in batch.reqs)
        return launch(batch, mode)

    engine.launch = spy  # type: ignore[method-assign]
    serve(scheduler, [new_req(0, prompt_of(4), max_tokens=50), new_req(1, prompt_of(5, 1), max_tokens=50)])
    assert scheduler.stats.preemptions > 0
    assert prompt_lens == {(0, 4), (1, 5)}


def test_one_batch_object_serves_a_steady_decode() -> None:
    engine, scheduler = make_scheduler(num_pages=500)
    seen: list[Any] = []
    launch = engine.launch

    def spy(batch: Any, mode: Any) -> Any:
        assert (batch.view, batch.input_ids, batch.positions, batch.out_loc, batch.scratch) == (None,) * 4 + ({},)
        seen.append(batch)
        batch.view, batch.positions, batch.scratch["plan"] = object(), object(), 1
        return launch(batch, mode)

    engine.launch = spy  # type: ignore[method-assign]
    serve(scheduler, [new_req(0, [1, 2], max_tokens=40), new_req(1, [3, 4], max_tokens=40)])
    assert len({id(batch) for batch in seen[1:]}) == 1
    assert len(seen) == 40
