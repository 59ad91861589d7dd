"""The client against a server with known delays, wrong answers, and every cut of the bytes."""

from __future__ import annotations

import itertools
import json
import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.bench.online.answer import Answer, EventReader
from minisgl_core.bench.online.http import Endpoint, parse_url
from minisgl_core.bench.online.load import Point, Request
from minisgl_core.bench.online.measure import Target, measure_point
from minisgl_core.errors import UsageError
from support.fake_server import FakeServer, Part, event, fake_server

DONE = event(b"[DONE]")
AT_ONCE = Point(math.inf)
LATE_MS = 30_000
"""A busy machine may be late by as much."""


def text(*tokens: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": "".join(tokens), "finish_reason": reason}], "usage": None})


def usage(tokens: int, prompt: int = 3, cached: int = 1) -> bytes:
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens, **details}})


def target(server: FakeServer, **more: Any) -> Target:
    return Target(parse_url(server.url), "fake", **more)


def measured(server: FakeServer, requests: list[Request], point: Point = AT_ONCE, **more: Any) -> dict[str, Any]:
    return measure_point(target(server, **more), requests, point)


def at_once(count: int, output: int = 4) -> list[Request]:
    return [Request(0.0, (1, 2, 3), output)] * count


def test_known_delays_give_known_latencies() -> None:
    def script(_: dict[str, Any]) -> list[Part]:
        return [0.3, text("a"), 0.1, text("b"), 0.2, text("c", "d", reason="length"), usage(4), DONE]

    with fake_server(script) as server:
        found = measured(server, at_once(3))
    assert found["errors"] == {} and found["completed"] == 3 and (found["tokens_in"], found["tokens_out"]) == (9, 12)
    assert found["events"] == 9 and found["cached_tokens"] == 3
    # sleeping ends late, never early; a clock of another resolution may differ by a millisecond
    assert 299 <= found["ttft_ms"]["p50"] < 300 + LATE_MS
    assert 299 + 300 <= found["e2e_ms"]["p50"] < 600 + LATE_MS
    assert 299 / 3 <= found["tpot_ms"]["p50"] < 100 + LATE_MS
    # gaps of 100 and 200 ms, three times: the sum is what separates the first event from the last one
    assert found["itl_ms"]["mean"] * 2 == pytest.approx(found["e2e_ms"]["mean"] - found["ttft_ms"]["mean"], rel=0.01)
    assert found["itl_ms"]["max"] >= 199


def test_the_request_is_streamed_with_usage_and_has_its_whole_length() -> None:
    with fake_server(lambda _: [text("a"), text("b", reason="length"), usage(2), DONE]) as server:
        endpoint = parse_url(server.url + "/v1/", "secret")
        measure_point(Target(endpoint, "m", temperature=0.5), [Request(0.0, (7, 8), 2)], Point(math.inf))
        measure_point(Target(endpoint, "m", chat=True), [Request(0.0, "Hello", 2)], Point(math.inf))
    first, second = server.bodies
    assert first == {
        "model": "m", "prompt": [7, 8], "max_tokens": 2, "temperature": 0.5, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert second["messages"] == [{"role": "user", "content": "Hello"}] and "prompt" not in second
    assert all("authorization: Bearer secret" in head for head in server.headers)


def test_the_opening_of_a_chat_and_a_separate_end_carry_no_token() -> None:
    def delta(content: dict[str, Any], reason: str | None = None) -> bytes:
        return event({"choices": [{"index": 0, "delta": content, "finish_reason": reason}]})

    def script(_: dict[str, Any]) -> list[Part]:
        opening = delta({"role": "assistant", "content": ""})
        return [opening, 0.3, delta({"content": "a"}), delta({"content": ""}), delta({}, "length"), usage(2), DONE]

    with fake_server(script) as server:
        found = measured(server, [Request(0.0, "Hi", 2)], chat=True)
    assert found["events"] == 2 and found["ttft_ms"]["p50"] >= 299  # text may be empty: a part of a character


ERROR = b'{"error": {"message": "the queue is full"}}'
FAILURES: dict[str, tuple[list[Part], str]] = {
    "status 429": (
        [b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n%s" % (len(ERROR), ERROR)],
        "the queue is full",
    ),
    "error event": ([text("a"), event(ERROR), DONE], "the queue is full"),
    "cut off": ([text("a")], "without [DONE]"),
    "connection": ([text("a"), None], "closed before"),
    "other length": ([text("a"), usage(1), DONE], "1 tokens instead of 4"),
    "no usage": ([text("a"), DONE], "`usage`"),
    "no output": ([DONE], "no event with output"),
    "timeout": ([text("a"), 60.0], "within 0.5 s"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_each_failure_has_a_kind_and_an_example(kind: str) -> None:
    parts, detail = FAILURES[kind]
    with fake_server(lambda _: parts) as server:
        found = measured(server, at_once(2), timeout_s=0.5 if kind == "timeout" else 60.0)
    assert found["completed"] == 0 and found["requests"] == 2 and found["ttft_ms"] is None
    assert list(found["errors"]) == [kind] and found["errors"][kind]["count"] == 2
    assert detail in found["errors"][kind]["example"]


def test_a_server_that_is_gone_is_a_failure_of_each_request() -> None:
    with fake_server(lambda _: []) as server:
        gone = target(server)
    found = measure_point(gone, at_once(2), Point(math.inf))
    (kind,) = found["errors"]
    assert kind in ("connection", "cannot connect") and found["errors"][kind]["count"] == 2


def good(_: dict[str, Any]) -> list[Part]:
    return [text("a"), 0.05, text("b", "c", "d", reason="length"), usage(4), DONE]


def test_concurrency_is_a_limit_and_connections_are_reused() -> None:
    with fake_server(good) as server:
        found = measured(server, at_once(12), Point(math.inf, 3))
    assert found["completed"] == 12 and server.most_in_flight <= 3 and found["concurrency"]["max"] <= 3
    assert server.connections < 12


def test_requests_are_sent_at_their_times() -> None:
    requests = [Request(0.2 * index, (1,), 4) for index in range(4)]
    with fake_server(good) as server:
        begin = time.perf_counter()
        found = measured(server, requests, Point(5.0))
        assert time.perf_counter() - begin >= 0.65
    assert found["rate"] == 5.0 and found["completed"] == 4 and found["client"]["sent_late_p99_ms"] < LATE_MS


def test_every_request_is_reported() -> None:
    seen: list[int] = []
    with fake_server(good) as server:
        measure_point(target(server), at_once(5), Point(math.inf), None, lambda: seen.append(1))
    assert len(seen) == 5


STREAM = b": a comment\n\n" + text("ä") + text("") + text("b") + text("c", reason="length") + usage(4) + DONE


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12), st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_found_at_every_cut(cuts: list[int], line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    answer = Answer(4, 0.0)
    reader = EventReader(answer)
    places = [0, *sorted(cuts), len(stream)]
    for number, (begin, end) in enumerate(itertools.pairwise(places)):
        reader.feed(stream[begin:end], float(number))
    reader.finish(200)
    assert answer.error is None, answer.detail
    assert len(answer.times) == 4 and (answer.tokens, answer.prompt_tokens, answer.cached_tokens) == (4, 3, 1)
    assert answer.times == sorted(answer.times)


def test_what_is_no_json_is_no_output() -> None:
    answer = Answer(4, 0.0)
    reader = EventReader(answer)
    reader.feed(event(b"{") + event(b"[1]") + DONE, 0.0)
    reader.finish(200)
    assert answer.error == "no output"


def test_addresses() -> None:
    assert parse_url("http://h:1/v1") == parse_url("http://h:1") == Endpoint("h", 1, False, "")
    assert parse_url("https://h/api/v1/", "k") == Endpoint("h", 443, True, "/api", "k")
    assert parse_url("http://[::1]:80").url == "http://[::1]:80" and parse_url("https://h/a").url == "https://h:443/a"
    for wrong in ("h:1", "ftp://h", "http://", "http://h:port", ""):
        with pytest.raises(UsageError, match="--url is"):
            parse_url(wrong)


def test_a_body_is_json() -> None:
    sent = Target(Endpoint("h", 1, False, "/p"), "m").encode(Request(0.0, "é", 1))
    head, _, body = sent.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /p/v1/completions HTTP/1.1\r\nhost: h:1\r\n")
    assert f"content-length: {len(body)}".encode() in head and json.loads(body)["prompt"] == "é"
