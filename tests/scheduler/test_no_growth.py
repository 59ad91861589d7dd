"""What the scheduler keeps depends on the requests alive, not on those served."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from minisgl_core.core import Req, SamplingParams
from minisgl_core.env import ENV
from minisgl_core.kvcache import IntegrityError
from minisgl_core.scheduler import Abort, Message, NewReq, Scheduler
from minisgl_core.scheduler.resources import StopIds
from minisgl_core.testing import StubEngine
from support.holdings import holdings
from support.served import serve

VOCAB, PAGES, ROWS, WAVE, WAVES = 4000, 160, 8, 40, 50


def wave(number: int) -> list[Message]:
    """Requests of every kind: each stops at ids of its own and shares a prefix with some; of each ten one is refused,
    one aborted, one fails; there are more than the pool can hold at once.
    """
    messages: list[Message] = []
    for uid in range(number * WAVE, (number + 1) * WAVE):
        rng = np.random.default_rng(uid)
        prompt = [uid % 3] * 20 + rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist()
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 40)),
            stop_token_ids=rng.integers(0, VOCAB, 3).tolist(),
            ignore_eos=bool(uid % 2),
            presence_penalty=float(uid % 4 == 0),
            logit_bias={uid % VOCAB: 1.0},
        )
        length = 200 if uid % 10 == 5 else len(prompt)
        messages.append(NewReq(uid, np.resize(np.array(prompt, dtype=np.int32), length), params))
        messages += [Abort(uid)] if uid % 10 == 6 else []
    return messages


def fails(req: Req, position: int) -> bool:
    return req.uid % 10 == 7 and position > req.prompt_len


def rested(scheduler: Scheduler) -> dict[str, int]:
    """What it holds with no request alive and no prefix cached."""
    scheduler.clear_cache()
    return holdings(scheduler)


@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_nothing_grows_with_the_requests_served(overlap: bool, cache: str) -> None:
    ENV.CHECK_INTEGRITY.value = False  # thousands of steps
    engine = StubEngine(
        num_pages=PAGES,
        max_running_req=ROWS,
        vocab_size=VOCAB,
        eos_token_ids=frozenset([2, VOCAB + 7]),
        nan_at=fails,
        cache=cache,
    )
    scheduler = Scheduler(engine)
    before = holdings(scheduler)
    assert len(before) > 20, "the scheduler's own containers, and those of its parts"
    served, reasons, first = 0, set[str | None](), dict[str, int]()
    for number in range(WAVES):
        answers = serve(scheduler, wave(number))
        engine.seen.clear()
        served += len(answers)
        reasons |= {answer.finish_reason for answer in answers.values()}
        scheduler.check_integrity()
        assert max(_variable(holdings(scheduler), before).values(), default=0) <= 2 * PAGES + 4 * ROWS
        if number == 2:
            first = rested(scheduler)
    assert (served, reasons) == (WAVES * WAVE, {"stop", "length", "error", "abort"})
    assert scheduler.stats.preemptions > 0
    assert _variable(rested(scheduler), first) == {}


def test_nothing_is_kept_of_requests_that_failed(overlap: bool) -> None:
    """In a large pool nothing is evicted, but a failed request leaves the prefix cache, with all references to it."""
    scheduler = Scheduler(StubEngine(num_pages=4000, vocab_size=VOCAB, nan_at=lambda req, position: req.uid > 0))
    serve(scheduler, [NewReq(0, np.arange(20, dtype=np.int32), SamplingParams(max_tokens=3))])
    before = holdings(scheduler)
    for uid in range(1, 300):
        prompt = np.arange(uid, uid + 20, dtype=np.int32)
        assert serve(scheduler, [NewReq(uid, prompt, SamplingParams(max_tokens=3))])[uid].finish_reason == "error"
    assert _variable(holdings(scheduler), before) == {}


def _variable(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """Containers that hold more than they did."""
    return {path: count for path, count in after.items() if count > before.get(path, 0)}


def test_a_stop_id_is_forgotten_with_the_last_request_that_it_stops() -> None:
    stops = StopIds(10)
    tokens = np.array([3, 4, 5, -1], dtype=np.int32)
    assert stops.contains(tokens).tolist() == [False, False, False, True]
    for ids in (frozenset([3, 4]), frozenset([4, 5]), frozenset[int]()):
        stops.add(ids)
    assert stops.contains(tokens).tolist() == [True, True, True, True]
    stops.remove(frozenset([3, 4]))
    assert stops.contains(tokens).tolist() == [False, True, True, True]
    stops.check([frozenset([4, 5])])
    for expected in ([], [frozenset([4])], [frozenset([4, 5]), frozenset([5])]):
        _assert_unbalanced(stops, expected)
    stops.remove(frozenset([4, 5]))
    assert stops.contains(tokens).tolist() == [False, False, False, True]
    stops.check([])


def _assert_unbalanced(stops: StopIds, expected: Sequence[frozenset[int]]) -> None:
    with pytest.raises(IntegrityError, match="stop ids are counted as"):
        stops.check(expected)
