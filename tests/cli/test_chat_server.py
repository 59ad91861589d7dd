"""``minisgl chat --url``: the same conversation, answered by a server: ours, and one whose faults a test chooses."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from minisgl_core.cli import chat_server
from minisgl_core.cli.app import main
from minisgl_core.cli.conversation import Answerer, Part
from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM, AsyncLLM
from support.http_server import Served, serving
from support.settings import SHARED

Capture = pytest.CaptureFixture[str]
Say = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("no_settings", "one_thread")


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Say:
    """``say(lines, *arguments)`` -> exit code, standard output, standard error."""

    def run(lines: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = main(["chat", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def async_llm(tiny: Callable[[str], Path]) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny("q3-text"), **SHARED)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def served(async_llm: AsyncLLM) -> Iterator[Served]:
    with serving(async_llm) as server:
        yield server


def test_a_server_of_ours_answers_as_the_engine_does(say: Say, served: Served, tiny: Callable[[str], Path]) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    expected = []
    with LLM(tiny("q3-text"), **SHARED) as llm:
        for line in ("hi", "yes"):
            if line == "yes":
                messages += [{"role": "assistant", "content": expected[-1]}, {"role": "user", "content": line}]
            (answer,) = llm.chat(messages, SamplingParams(max_tokens=6, ignore_eos=True), progress=False)
            expected.append(answer.text)
    flags = ("--system", "be", "--max-tokens", "6", "--temperature", "0", "--ignore-eos")
    code, out, err = say("hi\nyes\n", "--url", f"{served.url}/v1/", *flags)
    assert (code, out) == (0, "".join(f"{text}\n" for text in expected))
    assert err.count("[the answer was cut: --max-tokens") == 2


def test_an_error_of_the_server_is_one_line_and_the_conversation_goes_on(say: Say, served: Served) -> None:
    code, out, err = say(f"{'word ' * 100}\nhi\n", "--url", served.url, "--max-tokens", "2", "--model", "tiny")
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert code == 1 and out.count("\n") == 2 and "the context is 64 tokens" in line and "(status 400)" in line


def test_the_key_is_sent(say: Say, async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(async_llm, api_key="secret") as locked:
        code, _, err = say("hi\n", "--url", locked.url)
        assert code == 1 and err.count("\n") == 1 and "the API key is missing or wrong" in err
        assert say("hi\n", "--url", locked.url, "--api-key", "secret", "--max-tokens", "1")[0] == 0
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert say("hi\n", "--url", locked.url, "--max-tokens", "1")[0] == 0


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:99999", "http://x:y"])
def test_a_url_that_is_none_is_refused(say: Say, url: str) -> None:
    code, _, err = say("hi\n", "--url", url)
    assert code == 2 and err.startswith(f"error: --url is '{url}'") and err.count("\n") == 1


def test_a_server_that_is_not_there(say: Say) -> None:
    code, _, err = say("hi\n", "--url", "http://127.0.0.1:1")
    assert code == 1 and "does not answer" in err and err.count("\n") == 1


@pytest.mark.parametrize("flags", [("--device", "cpu"), ("--backend", "kv=cpu")])
def test_settings_of_an_engine_are_refused(say: Say, served: Served, flags: tuple[str, str]) -> None:
    code, _, err = say("hi\n", "--url", served.url, *flags)
    assert code == 2 and f"{flags[0]} has no effect on the server of --url" in err


def test_a_model_that_the_server_does_not_have(say: Say, served: Served) -> None:
    code, _, err = say("hi\n", "--url", served.url, "--model", "other")
    assert code == 2 and "has no model other" in err and "it has tiny" in err


def test_ctrl_c_ends_the_answer_and_the_servers_work(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from minisgl_core.cli.conversation import _Conversation

    step = served.llm.scheduler.step

    def slowly() -> Any:
        time.sleep(0.1)
        return step()

    class Interrupted:
        """The server's model, and a user who presses Ctrl-C after the second part of the first answer."""

        def __init__(self, model: Answerer) -> None:
            self.model, self.presses = model, 1

        def stream(self, messages: list[dict[str, str]]) -> Any:
            for count, part in enumerate(self.model.stream(messages)):
                yield part
                if count == 1 and self.presses:
                    self.presses -= 1
                    raise KeyboardInterrupt

        def limit(self, tokens: int) -> str:
            return self.model.limit(tokens)

    monkeypatch.setattr(served.llm.scheduler, "step", slowly)
    server = chat_server.ChatServer(served.url, None, None, {"max_tokens": 30, "ignore_eos": True})
    conversation = _Conversation(Interrupted(server), None)
    assert conversation.answer("hi") is None and conversation.has_begun
    assert served.rests(within_s=60), "the server goes on only with what is read"
    monkeypatch.undo()
    assert conversation.answer("yes") is None


class Faulty(BaseHTTPRequestHandler):
    """A server that answers what a test has put into ``body``."""

    body: ClassVar[bytes] = b""
    status: ClassVar[int] = 200

    def do_GET(self) -> None:
        self._send(200, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self._send(self.status, self.body)

    def _send(self, status: int, body: bytes) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Part]]]:
    """``faulty(body, status)`` -> the parts of an answer by a server that sends this."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def answer(body: bytes, status: int = 200) -> list[Part]:
        monkeypatch.setattr(Faulty, "body", body)
        monkeypatch.setattr(Faulty, "status", status)
        model = chat_server.ChatServer(f"127.0.0.1:{server.server_port}", "key", None, {})
        return list(model.stream([{"role": "user", "content": "x"}]))

    yield answer
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"error": {"message": "one\\ntwo"}}', 429, "one two (status 429)"),
        (b'{"error": "bare"}', 500, "bare (status 500)"),
        (b'{"detail": "fast"}', 422, "fast (status 422)"),
        (b"<html>bad gateway</html>", 502, "<html>bad gateway</html> (status 502)"),
        (b"", 503, "Service Unavailable (status 503)"),
        (b'data: {"error": {"message": "late"}}\n\n', 200, "late"),
        (b"data: [1]\n\n", 200, "is no event of OpenAI's API"),
        (b"data: {}\n\n", 200, "ended before the answer did"),
        (b"", 200, "ended before the answer did"),
    ],
)
def test_faults_are_one_line(faulty: Callable[..., list[Part]], body: bytes, status: int, says: str) -> None:
    *_, last = faulty(body, status)
    assert last.error is not None and says in last.error and "\n" not in last.error


def test_events_of_other_servers(faulty: Callable[..., list[Part]], capsys: Capture) -> None:
    """A comment that keeps the connection alive, a role first, CRLF, reasoning apart, usage last."""
    body = (
        b': keep-alive\r\n\r\ndata: {"choices": [{"delta": {"role": "assistant", "content": null}}]}\r\n\r\n'
        b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n'
        b'data:{"choices": [{"delta": {"content": "\xc3\xa4"}}]}\n\n'
        b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: {"choices": [], "usage": {}}\n\n'
        b"data: [DONE]\n\n"
    )
    parts = faulty(body)
    assert "".join(part.text for part in parts) == "ä" and [part.finish_reason for part in parts][-1] == "stop"
    assert all(part.error is None for part in parts) and capsys.readouterr().err == "hm"
