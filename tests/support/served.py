"""Requests for a scheduler, and its answers, collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minisgl_core.core import SamplingParams
from minisgl_core.engine import TokenLogprobs
from minisgl_core.scheduler import AnswerGrammars, Message, NewReq, Scheduler, TokenOut
from minisgl_core.testing import StubEngine

__all__ = ["VOCAB", "Answer", "assert_idle", "make_scheduler", "new_req", "prompt_of", "serve"]

VOCAB = 50
"""Size of the stub engine's vocabulary, by default."""


def new_req(uid: int, prompt: Sequence[int] | np.ndarray, **params: Any) -> NewReq:
    """A request for 5 tokens, unless ``params`` say otherwise."""
    return NewReq(uid, np.array(prompt, dtype=np.int32), SamplingParams(**{"max_tokens": 5, **params}))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids below :data:`VOCAB`."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return tokens


def make_scheduler(grammars: AnswerGrammars | None = None, **settings: Any) -> tuple[StubEngine, Scheduler]:
    """A scheduler on a stub engine with these settings."""
    engine = StubEngine(vocab_size=VOCAB, **settings)
    return engine, Scheduler(engine, grammars=grammars)


def assert_idle(scheduler: Scheduler, engine: StubEngine) -> None:
    """Nothing is left to do, and no page or row is lost."""
    stats = scheduler.stats
    assert (stats.running, stats.waiting, scheduler.has_work) == (0, 0, False)
    assert stats.free_pages + stats.cached_pages == engine.num_pages
    scheduler.check_integrity()


@dataclass
class Answer:
    """The whole output for one request."""

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
    """Apply ``messages`` and step until nothing is left to do. Answers by uid, in the order of their first output."""
    answers: dict[int, Answer] = {}
    scheduler.apply(messages)
    for _ in range(max_steps):
        if not scheduler.has_work:
            return answers
        for out in scheduler.step():
            answers.setdefault(out.uid, Answer()).add(out)
        scheduler.apply(scheduler.take_notices())
    raise RuntimeError(f"still at work after {max_steps} steps: {scheduler.stats}")
