"""Every figure of an online benchmark against numbers worked out by hand and against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minisgl_core.bench.online.answer import Answer
from minisgl_core.bench.online.figures import Client, figures, parse_objectives, summary
from minisgl_core.errors import UsageError

IDLE = Client((0.0, 0.001), cpu_s=0.1, wall_s=1.0)


def answer(sent: float, *times: float, tokens: int | None = None, error: str | None = None, **more: Any) -> Answer:
    tokens = len(times) if tokens is None else tokens
    end = times[-1] if times else sent + 0.5
    return Answer(tokens, sent, sent, list(times), end, tokens=tokens, error=error, **more)


ANSWERS = [
    answer(10.0, 10.1, 10.13, 10.17, prompt_tokens=7, cached_tokens=2),
    answer(10.5, 10.8, 11.0, tokens=5, prompt_tokens=11),  # two events of five tokens
    answer(11.0, 11.2, prompt_tokens=1),  # a single token
    answer(11.1, error="status 429", detail="full"),
    answer(11.2, error="status 429", detail="full again"),
    answer(11.3, error="timeout", detail="late"),
]
"""From 10 to 11.8 seconds"""


def test_latencies_by_hand() -> None:
    found = figures(ANSWERS, {}, IDLE)
    assert found["ttft_ms"]["mean"] == pytest.approx((100 + 300 + 200) / 3)
    assert found["ttft_ms"]["p50"] == pytest.approx(200)
    # 70 ms for two tokens after the first; 200 ms for four of them; a single token has none
    assert found["tpot_ms"]["mean"] == pytest.approx((35 + 50) / 2)
    assert found["itl_ms"]["mean"] == pytest.approx((30 + 40 + 200) / 3) and found["itl_ms"]["max"] == pytest.approx(
        200
    )
    assert found["e2e_ms"]["mean"] == pytest.approx((170 + 500 + 200) / 3)


def test_rates_count_what_was_answered() -> None:
    found = figures(ANSWERS, {}, IDLE)
    assert (found["requests"], found["completed"], found["tokens_in"], found["tokens_out"]) == (6, 3, 19, 9)
    assert found["seconds"] == pytest.approx(1.8) and found["cached_tokens"] == 2 and found["events"] == 6
    assert found["request_s"] == pytest.approx(3 / 1.8) and found["output_tok_s"] == pytest.approx(9 / 1.8)
    assert found["total_tok_s"] == pytest.approx(28 / 1.8) and found["goodput"] is None


def test_errors_are_counted_by_kind() -> None:
    assert figures(ANSWERS, {}, IDLE)["errors"] == {
        "status 429": {"count": 2, "example": "full"},
        "timeout": {"count": 1, "example": "late"},
    }


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    found = figures(ANSWERS, {"ttft": 250.0, "tpot": 40.0}, IDLE)["goodput"]
    # the first and the one of a single token; a failed request never counts
    assert found["request_s"] == pytest.approx(2 / 1.8) and found["share"] == pytest.approx(2 / 6)
    assert figures(ANSWERS, {"e2e": 180.0}, IDLE)["goodput"]["share"] == pytest.approx(1 / 6)


def test_requests_in_flight() -> None:
    found = figures([answer(0.0, 2.0), answer(1.0, 3.0), answer(3.0, 4.0)], {}, IDLE)["concurrency"]
    assert found == {"mean": pytest.approx(5 / 4), "max": 2}


def test_percentiles_are_those_of_numpy() -> None:
    values = np.random.default_rng(0).lognormal(size=1000)
    found = summary(list(values))
    assert found is not None
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert found[name] == pytest.approx(np.percentile(values * 1000, share))
    assert found["mean"] == pytest.approx(values.mean() * 1000) and found["max"] == pytest.approx(values.max() * 1000)
    # by hand, interpolated linearly: 99 of 100 steps between 1 and 2
    assert summary([0.001, 0.002]) == {"mean": 1.5, "p50": 1.5, "p90": 1.9, "p99": pytest.approx(1.99), "max": 2.0}
    assert summary([]) is None


def test_nothing_was_answered() -> None:
    found = figures([answer(1.0, error="connection")], {"ttft": 1.0}, IDLE)
    assert found["completed"] == 0 and found["ttft_ms"] is None and found["goodput"]["share"] == 0
    assert figures([], {}, IDLE)["request_s"] == 0


@pytest.mark.parametrize(
    ("client", "saturated"),
    [
        (IDLE, False),
        (Client([0.0] * 98 + [0.02] * 2, 0.1, 1.0), True),  # the loop is late at p99
        (Client((0.0,), 0.95, 1.0), True),  # its processor is busy
    ],
)
def test_a_client_that_is_too_slow_is_noticed(client: Client, saturated: bool) -> None:
    found = figures(ANSWERS, {}, client)["client"]
    assert found["saturated"] is saturated
    assert found["loop_lag_max_ms"] == pytest.approx(max(client.lags) * 1000)


def test_objectives_are_read() -> None:
    assert parse_objectives("ttft:200,tpot:30") == parse_objectives("ttft:200 tpot:30") == {"ttft": 200, "tpot": 30}
    assert parse_objectives("") == {}
    for wrong in ("ttft", "ttft:0", "ttft:fast", "ttft:nan", "speed:3"):
        with pytest.raises(UsageError, match="--goodput has"):
            parse_objectives(wrong)
    with pytest.raises(UsageError, match="did you mean 'ttft'"):
        parse_objectives("tfft:3")
