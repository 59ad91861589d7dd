"""Overlap of launching and processing, preemption, and the batch object of steady decode."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_core.testing.stub_engine import StubEngine, expected_tokens
from support.served import VOCAB, assert_idle, make_scheduler, new_req, prompt_of, serve


class Launches:
    """Records, at each launch, how many tokens of each row the host knows."""

    def __init__(self, engine: StubEngine) -> None:
        self.known: list[int] = []
        self._forward = engine.forward_batch
        engine.forward_batch = self  # type: ignore[method-assign, assignment]

    def __call__(self, batch: Any, mode: Any) -> Any:
        if batch.is_decode:
            self.known += [req.device_len - req.num_tokens for req in batch.reqs]
        return self._forward(batch, mode)


@pytest.mark.parametrize(
    ("params", "behind"),
    [
        ({}, 1),
        ({"presence_penalty": 1.0}, 0),
        ({"repetition_penalty": 1.5}, 0),
        ({"logprobs": 0}, 1),
        ({"logit_bias": {3: 1.0}}, 1),
        ({"min_tokens": 3}, 1),
    ],
)
def test_overlap_launches_before_it_processes_except_where_the_host_is_needed(
    overlap: bool, params: dict[str, Any], behind: int
) -> None:
    engine, scheduler = make_scheduler()
    launches = Launches(engine)
    answers = serve(scheduler, [new_req(0, [1, 2, 3], **params), new_req(1, [1, 2])])
    assert set(launches.known) == {behind if overlap else 0}
    assert answers[1].tokens == expected_tokens([1, 2], 5, VOCAB)


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
    forward = engine.forward_batch

    def spy(batch: Any, mode: Any) -> Any:
        prompt_lens.update((req.uid, req.prompt_len) for req in batch.reqs)
        return forward(batch, mode)

    engine.forward_batch = spy  # type: ignore[method-assign]
    serve(scheduler, [new_req(0, prompt_of(4), max_tokens=50), new_req(1, prompt_of(5, 1), max_tokens=50)])
    assert scheduler.stats.preemptions > 0
    assert prompt_lens == {(0, 4), (1, 5)}


def test_one_batch_object_serves_a_steady_decode() -> None:
    engine, scheduler = make_scheduler(num_pages=500)
    seen: list[Any] = []
    forward = engine.forward_batch

    def spy(batch: Any, mode: Any) -> Any:
        assert (batch.view, batch.input_ids, batch.positions, batch.out_loc, batch.scratch) == (None,) * 4 + ({},)
        seen.append(batch)
        batch.view, batch.positions, batch.scratch["plan"] = object(), object(), 1
        return forward(batch, mode)

    engine.forward_batch = spy  # type: ignore[method-assign]
    serve(scheduler, [new_req(0, [1, 2], max_tokens=40), new_req(1, [3, 4], max_tokens=40)])
    assert len({id(batch) for batch in seen[1:]}) == 1
    assert len(seen) == 40
