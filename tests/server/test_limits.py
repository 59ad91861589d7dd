"""Requests that take too long, clients that read nothing, steps that hang."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from openai import APIError, APIStatusError, OpenAI

from minisgl_core.llm import AsyncLLM
from minisgl_core.server import state
from support.http_server import Served, serving

LONG: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 50}


@pytest.fixture
def slow_down(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Steps take as long from then on."""
    step = async_llm.scheduler.step

    def slow_down(seconds: float) -> None:
        monkeypatch.setattr(async_llm.scheduler, "step", lambda: (time.sleep(seconds), step())[1])

    yield slow_down
    monkeypatch.undo()


@pytest.mark.parametrize("queued", [False, True])
def test_a_request_ends_with_its_time(
    served: Served, client: OpenAI, slow_down: Callable[[float], None], queued: bool
) -> None:
    slow_down(0.1)
    others = [
        served.raw(_post({**LONG, "stream": True, "ignore_eos": True}), read=200) for _ in range(8 if queued else 0)
    ]
    with pytest.raises(APIStatusError) as caught:
        client.completions.create(**LONG, extra_body={"timeout": 0.5, "ignore_eos": True})
    assert caught.value.status_code == 408 and caught.value.body is not None
    assert caught.value.response.headers["x-should-retry"] == "false"
    for other in others:
        other.close()
    assert served.rests()


def test_a_stream_ends_with_its_time_and_an_error(
    served: Served, client: OpenAI, slow_down: Callable[[float], None]
) -> None:
    slow_down(0.1)
    stream = client.completions.create(**LONG, stream=True, extra_body={"timeout": 1.5, "ignore_eos": True})
    assert next(stream).choices
    with pytest.raises(APIError, match="the time for this request is up"):
        list(stream)
    assert served.rests()


def test_the_server_has_a_limit_of_its_own(async_llm: AsyncLLM, slow_down: Callable[[float], None]) -> None:
    slow_down(0.1)
    with serving(async_llm, request_timeout_s=0.5) as impatient:
        for wanted in ({}, {"timeout": 1000}):
            with pytest.raises(APIStatusError) as caught:
                impatient.client.completions.create(**LONG, extra_body={"ignore_eos": True, **wanted})
            assert caught.value.status_code == 408
        assert impatient.rests()


@pytest.mark.parametrize(
    ("wanted", "says"), [(0, "`timeout`"), (-1, "`timeout`"), ("1", "`timeout`"), (1e999, "Infinity is no number")]
)
def test_a_time_that_is_none_is_refused(served: Served, wanted: Any, says: str) -> None:
    body = json.dumps({**LONG, "timeout": wanted}).encode()
    answer = httpx.post(f"{served.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_a_client_that_reads_nothing_is_given_up(async_llm: AsyncLLM) -> None:
    """Its socket holds little; the answer, with many log-probabilities, is larger than what the server buffers."""
    with serving(async_llm, stalled_s=1.0) as server:
        body = {**LONG, "prompt": [[5, 6, 7]] * 16, "n": 4, "logprobs": 20, "stream": True, "ignore_eos": True}
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(_post(body))
            assert eventually(lambda: bool(server.state.running)), connection.recv(1000)
            time.sleep(0.5)
            assert server.state.running, "what the server buffers is less than the answer"
            assert server.rests(within_s=60), "nothing of it has been read"
            received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
            assert received.startswith(b"HTTP/1.1 200") and b"[DONE]" not in received
        answer = server.client.completions.create(**{**LONG, "max_tokens": 1})
        assert answer.choices


def test_health_names_a_step_that_hangs(
    async_llm: AsyncLLM, slow_down: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "ANSWER_S", 0.1)
    slow_down(4.0)
    with serving(async_llm, hung_step_s=1.0) as server:
        with server.raw(_post({**LONG, "max_tokens": 1, "stream": True})):
            assert eventually(lambda: bool(server.state.running))
            first = httpx.get(f"{server.url}/health", timeout=30)
            assert eventually(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 503, within_s=6)
            hung = httpx.get(f"{server.url}/health", timeout=30)
        assert first.status_code == 200, "a step may take a second"
        if hung.status_code == 503:  # on a busy machine the step may have ended by now
            error = hung.json()["error"]
            assert error["code"] == "hung_step" and "of the engine has not ended for" in error["message"]
            assert "1 requests run" in error["message"] or "wait" in error["message"]
        assert server.rests(within_s=60)
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200


def _post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def eventually(check: Callable[[], bool], within_s: float = 60.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if check():
            return True
        time.sleep(0.05)
    return False
