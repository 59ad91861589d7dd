"""A whole engine for tests: a real model, a scheduler and any number of ranks. It records what it did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.env import ENV
from minisgl_core.llm import Runner
from minisgl_core.plugin_api import StepOutput
from minisgl_core.scheduler import Abort, NewReq, Scheduler, TokenOut

__all__ = ["Answer", "Driver", "greedy", "make_engine", "make_req", "prefill_logits"]


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    """The likeliest tokens; by default exactly ``max_tokens`` of them."""
    return SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **params})


@dataclass
class Answer:
    """All that was said about one request."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    def add(self, out: TokenOut) -> None:
        assert self.finish_reason is None, f"{out} came after the end, {self.finish_reason!r}"
        if out.token is not None:
            self.tokens.append(out.token)
        self.finish_reason, self.error = out.finish_reason, out.error


@contextmanager
def _switches(overlap: bool) -> Iterator[None]:
    """What a scheduler made inside reads from the environment; ranks started inside inherit it."""
    wanted = {ENV.CHECK_INTEGRITY: True, ENV.DISABLE_OVERLAP_SCHEDULING: not overlap}
    before = {switch: switch.value for switch in wanted}
    for switch, value in wanted.items():
        switch.value = value
    try:
        yield
    finally:
        for switch, value in before.items():
            switch.reset()
            if switch.value != value:
                switch.value = value


class Driver:
    """Use it as a context manager. The books are checked after every step, on every rank.

    ``replays`` lists each captured step that ran, as (rows, padded rows).
    """

    def __init__(self, path: Path, *, tp: int = 1, overlap: bool = True, **settings: Any) -> None:
        settings = {"dtype": torch.float32, "max_running_req": 4, "max_seq_len_override": 192, **settings}
        config = EngineConfig(model_path=str(path), device="cpu", progress=False, **settings)
        with _switches(overlap):
            self.runner = Runner(config, tp)
        self.answers: dict[int, Answer] = {}
        self.replays: list[tuple[int, int]] = []
        self._uids = count()
        self._watch_replays()

    @property
    def engine(self) -> Engine:
        return self.runner.engine

    @property
    def scheduler(self) -> Scheduler:
        return self.runner.scheduler

    def _watch_replays(self) -> None:
        graphs, replay = self.engine.graph_runner, self.engine.graph_runner.replay

        def watched(batch: Batch) -> StepOutput:
            self.replays.append((batch.size, batch.padded_size))
            return replay(batch)

        graphs.replay = watched

    def reschedule(self, *, overlap: bool, **settings: Any) -> None:
        """A new scheduler on the same engine; ``settings``: fields of EngineConfig that only a scheduler reads."""
        assert self.engine.tp.size == 1
        self.engine.config = replace(self.engine.config, **settings)
        with _switches(overlap):
            self.runner.scheduler = Scheduler(self.engine, self.engine.ctx.kv.match_len)

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Queue one request; returns its uid."""
        uid = next(self._uids)
        self.answers[uid] = Answer()
        self.runner.post(NewReq(uid, np.array(prompt, dtype=np.int32), params))
        return uid

    def abort(self, uid: int) -> None:
        self.runner.post(Abort(uid))

    def step(self) -> list[TokenOut]:
        outs = list(self.runner.step())
        for out in outs:
            self.answers[out.uid].add(out)
        return outs

    def drain(self) -> None:
        """Step until nothing is left to do, then see that every page is back."""
        while self.runner.has_work:
            self.step()
        stats = self.scheduler.stats
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_pages + stats.cached_pages == self.engine.num_pages

    def serve(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Answer]:
        """Answer all prompts together."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        uids = [self.submit(prompt, own) for prompt, own in zip(prompts, each, strict=True)]
        self.drain()
        return [self.answers[uid] for uid in uids]

    def tokens(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[int]]:
        """As :meth:`serve`, the tokens only."""
        return [answer.tokens for answer in self.serve(prompts, params)]

    def close(self) -> None:
        self.runner.close()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_engine(path: Path, rows: int = 4, length: int = 128, **settings: Any) -> Engine:
    """An engine to be driven by hand: page size 1, and row r owns slots ``r * length ..``."""
    fixed = {"max_running_req": rows, "max_seq_len_override": length, "num_page_override": rows * length}
    config = EngineConfig(
        model_path=str(path),
        device="cpu",
        progress=False,
        page_size=1,
        **{"dtype": torch.float32, **fixed, **settings},
    )
    engine = Engine(config)
    slots = torch.arange(rows * length, dtype=torch.int32).view(rows, length)
    engine.page_table[:rows, :length] = slots
    return engine


def make_req(tokens: Sequence[int], row: int, output_len: int = 1, cached_len: int = 0) -> Req:
    """A Req of a hand-driven engine."""
    ids = torch.tensor(tokens, dtype=torch.int32)
    return Req(ids, row, cached_len, output_len, row, greedy(max(1, output_len)), None)


def prefill_logits(engine: Engine, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """(B, V) float32: the logits after each prompt, computed in one pass on rows 0 to B - 1."""
    batch = Batch(reqs=[make_req(prompt, row) for row, prompt in enumerate(prompts)], phase="prefill")
    out = engine.forward_batch(batch, engine.sampler.prepare(batch))
    return out.logits.float().clone()
