"""Request queues: order by hand, and properties that every policy must have."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.core import SamplingParams
from minisgl_core.engine import EngineConfig
from minisgl_core.scheduler import QUEUES, Abort, NewReq, PriorityQueue, RequestQueue, Scheduler
from minisgl_core.scheduler.limits import MAX_PRIORITY
from minisgl_core.scheduler.records import PendingReq
from minisgl_core.scheduler.request_queue import AGING_STEPS
from minisgl_core.testing import StubEngine, expected_tokens
from support.served import Answer, serve

VOCAB = 50
POLICIES = pytest.mark.parametrize("name", list(QUEUES))


def pending(uid: int, priority: int = 0, step: int = 0) -> PendingReq:
    return PendingReq(uid, np.array([1], dtype=np.int32), 1, 5, SamplingParams(), priority, step)


def new(uid: int, priority: int = 0, prompt: tuple[int, ...] = (1, 2, 3), **params: Any) -> NewReq:
    given = SamplingParams(**{"max_tokens": 5, **params})
    return NewReq(uid, np.array(prompt, dtype=np.int32), given, priority)


def drain(queue: RequestQueue) -> Iterator[int]:
    while (head := queue.peek()) is not None:
        assert queue.pop() is head
        yield head.uid


def test_the_setting_offers_every_policy() -> None:
    assert set(get_args(get_type_hints(EngineConfig)["queue"])) == QUEUES.keys()


# ---- order, worked out by hand ---------------------------------------------------------------------------------------


def test_priority_order_by_hand() -> None:
    """A level is worth 64 steps, so the ranks ``step - 64 * priority`` are 0, -128, 10 - 128, 0 - 64, 70 - 64, 64 - 64:
    uid 1 before 2 (-128, -118), then 3 (-64), then 0 and 5 (both 0, in order of arrival), then 4 (6).
    """
    assert AGING_STEPS == 64
    queue = PriorityQueue()
    for uid, priority, step in [(0, 0, 0), (1, 2, 0), (3, 1, 0), (2, 2, 10), (5, 1, 64), (4, 1, 70)]:
        queue.add(pending(uid, priority, step))
    assert list(drain(queue)) == [1, 2, 3, 0, 5, 4]


@POLICIES
def test_equal_requests_are_admitted_in_order_of_arrival(name: str) -> None:
    queue = QUEUES[name]()
    for uid in (4, 2, 9, 0):
        queue.add(pending(uid))
    assert (len(queue), list(drain(queue)), len(queue)) == (4, [4, 2, 9, 0], 0)


@POLICIES
def test_preempted_requests_come_first_and_the_last_one_put_back_leads(name: str) -> None:
    queue = QUEUES[name]()
    queue.add(pending(0, MAX_PRIORITY))
    queue.put_back(pending(2))  # the youngest is preempted first, an older one after it
    queue.put_back(pending(1))
    queue.add(pending(3, MAX_PRIORITY))
    assert list(drain(queue)) == [1, 2, 0, 3]


@POLICIES
def test_a_removed_request_is_gone_and_may_return_under_its_uid(name: str) -> None:
    queue, first = QUEUES[name](), pending(0)
    queue.add(first)
    queue.add(pending(1))
    queue.remove(first)
    assert [len(queue), (queue.peek() or first).uid] == [1, 1]
    again = pending(0)
    queue.add(again)
    assert list(drain(queue)) == [1, 0]


@POLICIES
def test_removed_requests_take_no_memory(name: str) -> None:
    """A head that never fits must not keep thousands of aborted requests behind it alive."""
    queue = QUEUES[name]()
    queue.add(pending(0, MAX_PRIORITY))
    for uid in range(1, 5000):
        queue.add(one := pending(uid))
        queue.remove(one)
    held = max(len(getattr(queue, field)) for field in ("_waiting", "_heap") if hasattr(queue, field))
    assert held < 200
    assert list(drain(queue)) == [0]


# ---- properties ------------------------------------------------------------------------------------------------------

Change = tuple[Literal["add", "put_back", "remove", "pop"], int]
changes = st.lists(
    st.tuples(st.sampled_from(["add", "add", "add", "put_back", "remove", "pop"]), st.integers(-3, 3)), max_size=60
)


@POLICIES
@settings(max_examples=200, deadline=None)
@given(changes)
def test_nothing_is_lost_or_doubled(name: str, made: list[Change]) -> None:
    queue, waiting, uids = QUEUES[name](), dict[int, PendingReq](), count()
    popped: list[int] = []
    for step, (change, number) in enumerate(made):
        if change in ("add", "put_back"):
            one = pending(next(uids), number, step)
            waiting[one.uid] = one
            getattr(queue, change)(one)
        elif waiting and change == "remove":
            queue.remove(waiting.pop(list(waiting)[number % len(waiting)]))
        elif waiting:
            head = queue.peek()
            assert head is queue.peek() is queue.pop()
            assert head is not None
            popped.append(waiting.pop(head.uid).uid)
        assert len(queue) == len(waiting)
    rest = list(drain(queue))
    assert sorted(rest) == sorted(waiting)
    assert len({*popped, *rest}) == len(popped) + len(rest)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 400)), max_size=40))
def test_priority_order_is_that_of_the_aged_priorities(requests: list[tuple[int, int]]) -> None:
    """The aged priority is ``priority + waited / 64``; the test compares 64 times this, which is an integer."""
    requests = sorted(requests, key=lambda one: one[1])  # a request arrives at its step
    queue = PriorityQueue()
    for uid, (priority, step) in enumerate(requests):
        queue.add(pending(uid, priority, step))
    now = 1000
    aged = {uid: 64 * priority + now - step for uid, (priority, step) in enumerate(requests)}
    assert list(drain(queue)) == sorted(aged, key=lambda uid: (-aged[uid], uid))


@settings(max_examples=100, deadline=None)
@given(st.integers(-MAX_PRIORITY, MAX_PRIORITY), st.integers(-MAX_PRIORITY, MAX_PRIORITY), st.integers(0, 3))
def test_no_request_starves(priority: int, others: int, ties: int) -> None:
    """One request leaves and one arrives per step; after ``64 * (levels above it)`` steps newcomers rank behind it."""
    queue = PriorityQueue()
    queue.add(pending(0, priority, 0))
    bound = AGING_STEPS * max(0, others - priority)
    for uid in range(1, ties + 1):
        queue.add(pending(uid, others, 0))
    for step in range(1, bound + ties + 3):
        queue.add(pending(ties + step, others, step))
        if queue.pop().uid == 0:
            return
    pytest.fail("it was overtaken for longer than its age allows")


# ---- in the scheduler ------------------------------------------------------------------------------------------------


def first_seen(engine: StubEngine) -> list[int]:
    """Uids in the order of their first prefill pass."""
    return list(dict.fromkeys(row[0] for phase, rows in engine.seen if phase == "prefill" for row in rows))


def test_the_scheduler_admits_by_priority(overlap: bool) -> None:
    engine = StubEngine(vocab_size=VOCAB, max_running_req=1, queue="priority")
    scheduler = Scheduler(engine)
    answers = serve(scheduler, [new(0), new(1, -1), new(2, 3), new(3, 1), new(4, 3)])
    assert first_seen(engine) == [2, 4, 3, 0, 1]
    assert all(answer.tokens == expected_tokens([1, 2, 3], 5, VOCAB) for answer in answers.values())


def test_a_low_priority_is_admitted_in_time_while_high_ones_keep_coming() -> None:
    """One request of priority 0, and a new one of priority 1 in every step: it ranks before those that arrive after 64
    steps.
    """
    engine = StubEngine(vocab_size=VOCAB, max_running_req=1, queue="priority", num_pages=400, max_seq_len=400)
    scheduler = Scheduler(engine)
    scheduler.apply([new(0, 1, max_tokens=1)])
    scheduler.step()
    scheduler.apply([new(1)])
    for step in range(2, 300):
        scheduler.apply([new(step, 1, max_tokens=1)])
        scheduler.step()
    order = first_seen(engine)
    ahead = order[: order.index(1)]
    assert ahead == sorted(ahead)
    assert ahead[-1] <= 1 + AGING_STEPS < order[order.index(1) + 1]


def test_a_higher_priority_passes_a_head_that_does_not_fit(overlap: bool) -> None:
    """Request 1 needs more pages than the running one leaves; request 2 needs few."""
    engine = StubEngine(vocab_size=VOCAB, num_pages=60, queue="priority")
    scheduler = Scheduler(engine)
    scheduler.apply([new(0, max_tokens=30), new(1, prompt=(5,) * 50)])
    for _ in range(4):
        scheduler.step()
    assert first_seen(engine) == [0]
    scheduler.apply([new(2, 1)])
    scheduler.step()
    assert first_seen(engine) == [0, 2]
    answers = serve(scheduler, [])
    assert answers[1].tokens == expected_tokens([5] * 50, 5, VOCAB)


def test_a_preempted_req_is_admitted_before_higher_priorities(overlap: bool) -> None:
    engine = StubEngine(vocab_size=VOCAB, num_pages=60, max_running_req=2, queue="priority")
    scheduler = Scheduler(engine)
    answers = {uid: Answer() for uid in range(3)}
    scheduler.apply([new(0, max_tokens=50), new(1, prompt=(4, 5), max_tokens=50)])
    while not scheduler.stats.preemptions:
        for out in scheduler.step():
            answers[out.uid].add(out)
    scheduler.apply([new(2, MAX_PRIORITY, prompt=(7, 8))])
    while scheduler.has_work:
        for out in scheduler.step():
            answers[out.uid].add(out)
    assert [answer.finish_reason for answer in answers.values()] == ["length"] * 3
    assert answers[1].tokens == expected_tokens([4, 5], 50, VOCAB)
    passes = [row[0] for phase, rows in engine.seen if phase == "prefill" for row in rows]
    assert passes == [0, 1, 1, 2]


@pytest.mark.parametrize("priority", [-1, 5])
def test_fifo_refuses_a_priority_by_name(priority: int) -> None:
    scheduler = Scheduler(StubEngine(vocab_size=VOCAB))
    answers = serve(scheduler, [new(0, priority), new(1)])
    assert answers[0].finish_reason == "error"
    assert f"`priority` is {priority}, but this engine admits" in (answers[0].error or "")
    assert 'set `queue="priority"`' in (answers[0].error or "")
    assert answers[1].finish_reason == "length"


@pytest.mark.parametrize("priority", [MAX_PRIORITY + 1, -MAX_PRIORITY - 1, True, 1.5, "high"])
def test_a_priority_out_of_range_is_refused(priority: Any) -> None:
    scheduler = Scheduler(StubEngine(vocab_size=VOCAB, queue="priority"))
    (answer,) = serve(scheduler, [new(0, priority)]).values()
    assert f"`priority` is {priority!r}; give an integer from -100 to 100" in (answer.error or "")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=10),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=4),
)
def test_ranks_agree(requests: list[tuple[int, int, int]], aborts: list[tuple[int, int]]) -> None:
    """Two ranks with the same messages before the same steps launch the same passes, preemptions included."""
    engines = [StubEngine(vocab_size=VOCAB, num_pages=30, max_running_req=3, queue="priority") for _ in range(2)]
    schedulers = [Scheduler(engine) for engine in engines]
    for step in range(400):
        messages = [
            new(uid, priority, prompt=(uid, 1, 2), max_tokens=count)
            for uid, (priority, at, count) in enumerate(requests)
            if at == step
        ]
        for scheduler in schedulers:
            scheduler.apply([*messages, *(Abort(uid) for at, uid in aborts if at == step)])
            if scheduler.has_work:
                scheduler.step()
    assert not any(scheduler.has_work for scheduler in schedulers)
    assert engines[0].seen == engines[1].seen
