"""Each figure of a benchmark against the number worked out by hand, on a clock that only known acts advance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minisgl_core.bench.limits import Ceilings, PassFacts, pass_seconds
from minisgl_core.bench.measure import Figures, Result, measure
from minisgl_core.bench.workloads import Workload, make_workload
from minisgl_core.errors import EngineError
from minisgl_core.modelconfig.geometries import geometry
from support.timed_llm import TimedLLM

CEILINGS = Ceilings(1e9, 1e12)
WORK = Workload("offline", ((1, 2, 3, 4), (5, 6, 7, 8, 9, 10)), (5, 1), 0.6)
"""Four and six prompt tokens; five tokens and one token of answer. In milliseconds, from the call on:

| step | pass | takes | until |
| --- | --- | --- | --- |
| 1 | prefill of 4 | 1 + 2 + 40 + 3 | 46: the first request's first token |
| 2 | prefill of 6 | 1 + 2 + 60 + 3 | 112: the second request's only token |
| 3 | decode, other rows | 1 + 4 + 2 + 5 + 3 | 127 |
| 4 and 5 | decode | 1 + 2 + 5 + 3 each | 149 |
| 6 | decode, the end | 1 + 2 + 5 + 3 | 160 |
"""


def run(llm: TimedLLM, work: Workload = WORK, repeat: int = 1, **more: Any) -> Result:
    return measure(llm, work, CEILINGS, repeat, progress=False, clock=llm.clock, **more)  # type: ignore[arg-type]


def figures(llm: TimedLLM, work: Workload = WORK) -> Figures:
    return run(llm, work).runs[0]


def test_rates_count_the_tokens_that_they_name() -> None:
    found = figures(TimedLLM())
    assert found.seconds == pytest.approx(0.160)
    assert found.tok_s == pytest.approx(6 / 0.160)  # of the answers alone
    assert found.in_tok_s == pytest.approx(10 / 0.160)


def test_the_first_token_is_each_requests_own() -> None:
    assert figures(TimedLLM()).ttft_ms == pytest.approx((46 + 112) / 2)


def test_time_per_token_is_per_token_after_the_first() -> None:
    assert figures(TimedLLM()).tpot_ms == pytest.approx((160 - 46) / 4)
    alone = replace(WORK, outputs=(1, 1))
    assert figures(TimedLLM(), alone).tpot_ms is None


def test_host_time_leaves_out_waiting_and_says_what_kind_of_step() -> None:
    found = figures(TimedLLM())
    assert found.host_us_prefill == pytest.approx(6000)  # schedule 1, launch 2, process 3
    assert found.host_us_steady == pytest.approx(6000) and found.launch_us_steady == pytest.approx(2000)
    assert found.host_us_changed == pytest.approx((10_000 + 6000) / 2)  # step 3 and step 6
    assert found.host_us_per_step == pytest.approx(6000)  # of 10, 6, 6, 6
    assert (found.steps_prefill, found.steps_changed, found.steps_steady) == (2, 2, 2)
    alone = figures(TimedLLM(), replace(WORK, outputs=(1, 1)))
    assert alone.host_us_per_step is alone.host_us_steady is alone.host_us_changed is None


def test_host_time_leaves_out_what_a_cpu_computes() -> None:
    found = figures(TimedLLM(on_cpu=True))
    assert found.seconds == pytest.approx(0.160)
    assert [found.host_us_steady, found.host_us_prefill] == pytest.approx([4000, 4000])  # schedule 1, process 3
    assert found.launch_us_steady == 0


def test_host_time_leaves_out_the_measuring() -> None:
    llm = TimedLLM()
    llm.platform.record_ms = 0.5  # four marks for each of six passes
    found = figures(llm)
    assert found.seconds == pytest.approx(0.172) and found.host_us_steady == pytest.approx(6000)


def test_the_share_inside_passes_is_of_the_devices_own_time() -> None:
    assert figures(TimedLLM()).device_pass_share == pytest.approx((40 + 60 + 4 * 5) / 160)


def test_the_limit_is_of_the_passes_that_were_run() -> None:
    passes = [PassFacts(False, 4, 1, 0), PassFacts(False, 6, 1, 0)]
    passes += [PassFacts(True, 1, 1, context) for context in (4, 5, 6, 7)]
    shortest = sum(pass_seconds(geometry("tiny"), one, CEILINGS, 2) for one in passes)
    assert figures(TimedLLM()).limit_share == pytest.approx(shortest / 0.160)


def test_nothing_is_in_the_cache_when_a_run_begins() -> None:
    llm = TimedLLM()
    result = run(llm, repeat=2)
    assert [one.seconds for one in result.runs] == pytest.approx([0.160, 0.160])
    assert [one.cached_tokens for one in result.runs] == [0, 0]
    assert llm.calls == [[], list(WORK.prompts)] * 3


def test_of_equal_runs_the_median_and_the_slowest() -> None:
    llm = TimedLLM(pauses={3: 0.340})  # the second of three runs behind the warm-up
    result = run(llm, repeat=3)
    assert result.median.seconds == pytest.approx(0.160) and result.slowest["seconds"] == pytest.approx(0.500)
    assert result.slowest["tok_s"] == pytest.approx(6 / 0.5) and result.slowest["ttft_ms"] == pytest.approx(79 + 340)
    kept = result.to_json()
    assert kept["slowest"] == result.slowest and [one["seconds"] for one in kept["runs"]] == pytest.approx(
        [0.160, 0.500, 0.160]
    )


def test_latency_is_what_a_reader_of_the_stream_sees() -> None:
    found = figures(TimedLLM(), Workload("latency", ((1, 2, 3),), (4,), 0.6))
    # prefill of 3: 36; decode: 15, 11, 11
    assert found.ttft_ms == pytest.approx(36) and found.tpot_ms == pytest.approx((15 + 11 + 11) / 3)
    assert found.seconds == pytest.approx(0.073) and found.tok_s == pytest.approx(4 / 0.073)


def test_a_shorter_warm_up_and_no_run_that_would_end_too_late() -> None:
    llm = TimedLLM()
    assert len(run(llm, repeat=3, warm_up=replace(WORK, outputs=(1, 1)), until=0.0).runs) == 1
    assert len(llm.calls) == 4


def test_lost_tokens_are_an_error() -> None:
    llm = TimedLLM()
    generate = llm.generate

    def less(*arguments: Any, **named: Any) -> Any:
        return [{"token_ids": answer["token_ids"][:-1]} for answer in generate(*arguments, **named)]

    llm.generate = less  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="request 0 gave 4 tokens instead of 5"):
        run(llm)


def test_case_135_only_the_prefix_is_in_the_cache() -> None:
    """Eight shared tokens, tails of two and three. Steps: prefill of 2 and of 3, then the decode of both."""
    prefix = tuple(range(8))
    work = Workload("shared-prefix", ((*prefix, 90, 91), (*prefix, 92, 93, 94)), (2, 2), 0.6, shared=8)
    llm = TimedLLM()
    result = run(llm, work, repeat=3)
    assert [one.seconds for one in result.runs] == pytest.approx([0.026 + 0.036 + 0.015] * 3)
    assert [one.cached_tokens for one in result.runs] == [16, 16, 16]
    clears, warmings, runs = llm.calls[0::3], llm.calls[1::3], llm.calls[2::3]
    assert clears == [[]] * 4 and warmings == [[prefix]] * 4
    tails = [prompt[8:] for prompts in runs for prompt in prompts]
    assert {prompt[:8] for prompts in runs for prompt in prompts} == {prefix}
    assert len(set(tails)) == 8 and [len(tail) for tail in tails] == [2, 3] * 4


def test_case_135_other_runs_draw_the_same_lengths_and_a_run_is_repeatable() -> None:
    work = make_workload("shared-prefix")
    again = work.redrawn(1)
    assert again == work.redrawn(1) != work.redrawn(2) and again.facts() == work.facts()
    assert again.prefix == work.prefix and len(work.prefix) == 2048
    assert not {prompt[2048:] for prompt in work.prompts} & {prompt[2048:] for prompt in again.prompts}
    assert make_workload("offline").redrawn(1) == make_workload("offline")
