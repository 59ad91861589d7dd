"""The requests of a load: their times, their lengths, and traces."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.bench.online.load import Lengths, Load, Point, parse_numbers, read_trace
from minisgl_core.errors import UsageError

ALL = Point(math.inf)


def load(**more: Any) -> Load:
    return Load(**{"requests": 50, "inputs": Lengths(3, 9), "outputs": Lengths(2, 4), "vocab_size": 100, **more})


def gaps(point: Point, **more: Any) -> list[float]:
    return [b.at - a.at for a, b in itertools.pairwise(load(**more).draw(point, 0))]


def test_lengths_and_ids_are_in_their_ranges() -> None:
    drawn = load().draw(ALL, 0)
    assert len(drawn) == 50 and {one.at for one in drawn} == {0.0}
    assert {len(one.prompt) for one in drawn} == set(range(3, 10)) and {one.output for one in drawn} == {2, 3, 4}
    assert {type(one.prompt) for one in drawn} == {tuple}
    assert all(0 <= token < 100 for one in drawn for token in one.prompt)  # type: ignore[operator]


def test_a_seed_gives_the_same_work_and_each_point_new_prompts() -> None:
    assert load().draw(ALL, 0) == load().draw(ALL, 0)
    assert load().draw(ALL, 0) != load().draw(ALL, 1) and load().draw(ALL, 0) != load(seed=1).draw(ALL, 0)


def test_a_shared_prefix_precedes_every_prompt_of_every_point() -> None:
    drawn = load(shared_prefix=5).draw(ALL, 0) + load(shared_prefix=5).draw(ALL, 1)
    assert len({one.prompt[:5] for one in drawn}) == 1 and {len(one.prompt) for one in drawn} == set(range(8, 15))


def test_fixed_arrivals_are_equally_far_apart() -> None:
    assert gaps(Point(8.0), arrivals="fixed") == [0.125] * 49


def test_poisson_arrivals_have_exponential_gaps() -> None:
    found = gaps(Point(8.0), requests=20_001)
    # mean and standard deviation of an exponential distribution are both 1 / rate
    assert statistics.mean(found) == pytest.approx(0.125, rel=0.05)
    assert statistics.stdev(found) == pytest.approx(0.125, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_changes_the_variance_alone(burstiness: float) -> None:
    found = gaps(Point(8.0), requests=20_001, burstiness=burstiness)
    assert statistics.mean(found) == pytest.approx(0.125, rel=0.05)
    # a gamma distribution of shape k: standard deviation = mean / sqrt(k)
    assert statistics.stdev(found) == pytest.approx(0.125 / math.sqrt(burstiness), rel=0.08)


def test_a_duration_sets_the_number_of_requests_at_a_finite_rate() -> None:
    assert len(load(duration_s=2.5).draw(Point(8.0), 0)) == 20
    assert len(load(duration_s=2.5).draw(ALL, 0)) == 50


def test_points_have_short_names() -> None:
    named = (Point(2.0), Point(0.5, 3), Point(math.inf, 3), ALL)
    assert [point.label for point in named] == ["2/s", "0.5/s x3", "x3", "inf/s"]


@pytest.mark.parametrize("text", ["0", "5..3", "-1", "3..", "..3", "x", "1.5"])
def test_wrong_lengths_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--input-len is"):
        Lengths.parse(text, "--input-len")


def test_lists_of_numbers() -> None:
    assert parse_numbers("1,2.5,inf", "--rate", whole=False) == [1, 2.5, math.inf]
    assert parse_numbers("1,16", "--concurrency", whole=True) == [1, 16]
    for text, whole in (("0", False), ("", False), ("1,,2", False), ("nan", False), ("1.5", True), ("inf", True)):
        with pytest.raises(UsageError, match="--it is"):
            parse_numbers(text, "--it", whole=whole)


def trace(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_trace_gives_times_lengths_and_prompts(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "trace.jsonl",
        {"timestamp": 1.5, "input_length": 4, "output_length": 2},
        "",
        {"timestamp": 0, "prompt": "Hello", "output_length": 3},
        {"timestamp": 2, "prompt": [5, 6], "output_length": 1},
    )
    drawn = load(trace=read_trace(path)).draw(ALL, 0)
    assert [(one.at, one.output) for one in drawn] == [(0, 3), (1.5, 2), (2, 1)]
    assert drawn[0].prompt == "Hello" and len(drawn[1].prompt) == 4 and drawn[2].prompt == (5, 6)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 1: it is no JSON object"),
        ("{", "line 1: "),
        ({"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": [1]}, "unknown key 'hash_ids'"),
        ({"input_length": 2, "output_length": 3}, "`timestamp` is None"),
        ({"timestamp": -1, "input_length": 2, "output_length": 3}, "`timestamp` is -1"),
        ({"timestamp": 1, "input_length": 0, "output_length": 3}, "`input_length` is 0"),
        ({"timestamp": 1, "input_length": 1, "output_length": "3"}, "`output_length` is '3'"),
        ({"timestamp": 1, "prompt": "", "output_length": 3}, "`prompt` is no text"),
        ({"timestamp": 1, "prompt": [1, "a"], "output_length": 3}, "`prompt` is 'a'"),
        ("", "has no line"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(UsageError, match="--trace") as error:
        read_trace(trace(tmp_path / "trace.jsonl", line))
    assert message in str(error.value)


def test_a_trace_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
