"""What a scheduler answered, collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minisgl_core.engine import TokenLogprobs
from minisgl_core.scheduler import Message, Scheduler, TokenOut

__all__ = ["Answer", "serve"]


@dataclass
class Answer:
    """All that a scheduler said about one request."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def add(self, out: TokenOut) -> None:
        if self.finish_reason is not None:
            raise RuntimeError(f"{out} came after the end, {self.finish_reason!r}")
        if out.token is not None:
            self.tokens.append(out.token)
            self.logprobs.append(out.logprobs)
        self.finish_reason, self.error, self.stop_reason = out.finish_reason, out.error, out.stop_reason


def serve(scheduler: Scheduler, messages: Sequence[Message], max_steps: int = 10_000) -> dict[int, Answer]:
    """Apply ``messages``, step until nothing is left to do; answers by uid, in order of their first word."""
    answers: dict[int, Answer] = {}
    scheduler.apply(messages)
    for _ in range(max_steps):
        if not scheduler.has_work:
            return answers
        for out in scheduler.step():
            answers.setdefault(out.uid, Answer()).add(out)
    raise RuntimeError(f"still at work after {max_steps} steps: {scheduler.stats}")
