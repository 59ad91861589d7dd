"""An LLM whose every act takes a known time on a clock of its own, so that each benchmark figure can be worked out by
hand.

A step of the scheduler takes, in milliseconds: 1 to schedule, 2 to launch, the device's time while the host waits, and
3 to process. The device needs 10 for each prompt token that the prefix cache does not hold, and 5 for a decode pass.
The first decode pass with other rows takes 4 more to schedule. Waiting prompts are served first, one in each pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from minisgl_core.distributed import DistributedInfo
from minisgl_core.engine import ForwardOutput
from minisgl_core.modelconfig.geometries import geometry
from minisgl_core.plugin_api import StepOutput
from minisgl_core.scheduler import PromptOut, TokenOut, TokenOuts, TokenRun

__all__ = ["TimedLLM"]


@dataclass
class Request:
    uid: int
    prompt: tuple[int, ...]
    wanted: int
    tokens: list[int] = field(default_factory=list)


class _Platform:
    """Events see the device's time; marking one takes ``record_ms`` of the host's."""

    def __init__(self, llm: TimedLLM) -> None:
        self._llm = llm
        self.record_ms = 0.0

    def new_event(self, *, timing: bool = False) -> Any:
        event = SimpleNamespace(at=0.0)

        def record() -> None:
            self._llm.spend(self.record_ms)
            event.at = self._llm.device_ms

        event.record, event.elapsed_time = record, lambda end: end.at - event.at
        return event

    def synchronize(self) -> None:
        pass


class _Engine(SimpleNamespace):
    def launch(self, batch: Any, mode: str) -> StepOutput:
        return self.llm.launch(batch)  # type: ignore[no-any-return]

    def finish(self, batch: Any, step: StepOutput) -> ForwardOutput:
        return self.llm.finish(batch)  # type: ignore[no-any-return]


class _Scheduler:
    def __init__(self, llm: TimedLLM) -> None:
        self._llm = llm

    def step(self) -> TokenOuts:
        return self._llm.step()


class TimedLLM:
    """``on_cpu``: the device's time is spent while the pass is launched. ``pauses``: by the number of a call of
    ``generate``, seconds that it takes longer.
    """

    def __init__(self, on_cpu: bool = False, pauses: dict[int, float] | None = None) -> None:
        self.on_cpu, self.pauses = on_cpu, pauses or {}
        self.now_ms = self.device_ms = 0.0
        self.platform = _Platform(self)
        self.engine: Any = _Engine(
            llm=self, device=torch.device("cpu") if on_cpu else SimpleNamespace(type="cuda"), platform=self.platform,
            vocab_size=20_000, model_config=geometry("tiny"), dtype=torch.bfloat16, tp=DistributedInfo(0, 1),
        )  # fmt: skip
        self.scheduler: Any = _Scheduler(self)
        self.calls: list[list[tuple[int, ...]]] = []
        """The prompts of each ``generate``; of ``clear_cache`` an empty list."""
        self._cache: set[tuple[int, ...]] = set()
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._rows: np.ndarray | None = None
        self._uids = 0

    def clock(self) -> float:
        return self.now_ms / 1000

    def spend(self, ms: float) -> None:
        self.now_ms += ms

    # What a benchmark calls.

    def clear_cache(self) -> None:
        self.calls.append([])
        self._cache.clear()

    def generate(self, prompts: Sequence[Sequence[int]], params: Any, *, progress: bool) -> list[dict[str, Any]]:
        assert not progress
        self.calls.append([tuple(prompt) for prompt in prompts])
        params = params if isinstance(params, list) else [params] * len(prompts)
        requests = [self._request(*pair) for pair in zip(prompts, params, strict=True)]
        self.spend(1000 * self.pauses.get(sum(map(bool, self.calls)), 0.0))
        while self._waiting or self._running:
            self.scheduler.step()
        return [{"token_ids": request.tokens} for request in requests]

    def stream(self, prompt: Sequence[int], params: Any) -> Iterator[Any]:
        self.calls.append([tuple(prompt)])
        request = self._request(prompt, params)
        while self._waiting or self._running:
            self.scheduler.step()
            yield SimpleNamespace(token_ids=request.tokens[-1:])

    def _request(self, prompt: Sequence[int], params: Any) -> Request:
        assert params.ignore_eos
        self._uids += 1
        request = Request(self._uids, tuple(prompt), params.max_tokens)
        self._waiting.append(request)
        return request

    # What it does.

    def step(self) -> TokenOuts:
        self.spend(1)
        if self._waiting:
            chosen, self._rows = [self._waiting.pop(0)], None
            self._running += chosen
            held = self._held(chosen[0].prompt)
            lengths = held, len(chosen[0].prompt)
            self._cache.add(chosen[0].prompt)
        else:
            chosen = list(self._running)
            if self._rows is None:
                self._rows = np.array([request.uid for request in chosen])
                self.spend(4)
            lengths = tuple(sum(len(r.prompt) + len(r.tokens) - less for r in chosen) for less in (1, 0))
        batch = SimpleNamespace(
            is_decode=self._rows is not None, is_prefill=self._rows is None, size=len(chosen), table_idx=self._rows,
            cached_lens=lambda: np.array([lengths[0]]), device_lens=lambda: np.array([lengths[1]]),
        )  # fmt: skip
        self.engine.finish(batch, self.engine.launch(batch, "random")).wait()
        self.spend(3)
        outs = list(self._process(chosen))
        return TokenOuts([PromptOut(chosen[0].uid, lengths[0]), *outs] if batch.is_prefill else outs)

    def _held(self, prompt: tuple[int, ...]) -> int:
        """Tokens of the prompt that are in the cache; the last one is always computed."""
        shared = [sum(1 for _ in iter_common(prompt, other)) for other in self._cache]
        return min(max(shared, default=0), len(prompt) - 1)

    def launch(self, batch: Any) -> StepOutput:
        self.spend(2)
        takes = self._takes(batch)
        self.device_ms += takes
        if self.on_cpu:
            self.spend(takes)
        return StepOutput(torch.empty(0), torch.empty(0))

    def _takes(self, batch: Any) -> int:
        return 5 if batch.is_decode else 10 * int(batch.device_lens().sum() - batch.cached_lens().sum())

    def finish(self, batch: Any) -> ForwardOutput:
        takes = self._takes(batch)
        wait = SimpleNamespace(synchronize=lambda: None if self.on_cpu else self.spend(takes))
        return ForwardOutput(**{**dict.fromkeys(ForwardOutput._fields), "copied": wait})  # type: ignore[arg-type]

    def _process(self, chosen: list[Request]) -> Iterator[TokenOut | TokenRun]:
        running = []
        for request in chosen:
            request.tokens.append(7)
            if len(request.tokens) == request.wanted:
                self._running.remove(request)
                self._rows = None
                yield TokenOut(request.uid, 7, "length")
            else:
                running.append(request.uid)
        if running:
            yield TokenRun(running, [7] * len(running))


def iter_common(one: Sequence[int], other: Sequence[int]) -> Iterator[int]:
    """The tokens that both begin with."""
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a
