"""One streamed answer: when its events arrived, and what it says of itself at the end."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["Answer", "EventReader"]

_DETAIL: Final = 300
"""Characters of an error that are kept."""


@dataclass(slots=True)
class Answer:
    """What a client observed of one request. Times are in seconds, by ``time.perf_counter``."""

    wanted: int
    """Output tokens that were requested."""
    due: float
    """When the request should have been sent."""
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    """Arrivals of the events that carry output."""
    end: float = 0.0
    """When it ended, with whatever result."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    error: str | None = None
    """The kind of its failure."""
    detail: str = ""

    @property
    def ttft(self) -> float:
        """From sending the request to the first event with output."""
        return self.times[0] - self.sent

    @property
    def latency(self) -> float:
        """From sending the request to the last event with output."""
        return self.times[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Time after the first event, per token after the first; None for a single token."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None

    def fail(self, kind: str, detail: str = "") -> None:
        """Note a failure; the first one counts."""
        if self.error is None:
            self.error, self.detail = kind, " ".join(detail.split())[:_DETAIL]


class EventReader:
    """Reads the body of one answer: server-sent events, or the JSON object of an error.

    Only the first events and the last one are decoded. The events between carry output, because a server sends nothing
    else in the middle of an answer.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rest = b""
        self._ended = False
        self._last = b""

    def feed(self, body: bytes, now: float) -> None:
        """A part of the body, received at ``now``."""
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._ended = True
        elif data.startswith(b'{"error"'):
            self._answer.fail("error event", _message(data))
        elif self._answer.times or _has_output(data):
            self._answer.times.append(now)
            self._last = data

    def finish(self, status: int) -> None:
        """The answer is complete: count its tokens, and find out whether it failed."""
        answer = self._answer
        if status != 200:
            answer.fail(f"status {status}", _message(self._rest))
        elif not self._ended:
            answer.fail("cut off", "the stream ended without [DONE]")
        elif not answer.times:
            answer.fail("no output", "the stream has no event with output")
        if answer.error is None:
            self._count()

    def _count(self) -> None:
        answer, last = self._answer, _decoded(self._last)
        used = last.get("usage") or {}
        if not last.get("choices"):  # it carries the usage alone
            answer.times.pop()
        answer.prompt_tokens = used.get("prompt_tokens") or 0
        answer.cached_tokens = (used.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        answer.tokens = used.get("completion_tokens") or 0
        if not used:
            answer.fail("no usage", "the server does not send `usage`, so tokens cannot be counted")
        elif answer.tokens != answer.wanted:
            answer.fail("other length", f"{answer.tokens} tokens instead of {answer.wanted}")
        elif len(answer.times) > answer.tokens:  # the last event carried the finish reason alone
            answer.times.pop()


def _decoded(data: bytes) -> dict[str, Any]:
    """An event; an empty one for what is no JSON object."""
    try:
        event = json.loads(data)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _has_output(data: bytes) -> bool:
    """False for a chunk without choices, and for the first of a chat, which has only the role."""
    event = _decoded(data)
    if not event.get("choices"):
        return False
    choice = event["choices"][0]
    delta = choice.get("delta")
    return "text" in choice if delta is None else "role" not in delta or bool(delta.get("content"))


def _message(body: bytes) -> str:
    """The message of an error in OpenAI's shape, or the text itself."""
    try:
        content = json.loads(body)
        error = content.get("error", content)
        return str(error.get("message", error))
    except (ValueError, AttributeError):
        return body.decode("utf-8", "replace")
