"""Instrumentation of a running engine: passes, scheduler steps, and the arrival times of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from minisgl_core.scheduler import PromptOut, TokenOut, TokenOuts

from .limits import PassFacts

if TYPE_CHECKING:
    import numpy as np

    from minisgl_core.core import Batch
    from minisgl_core.engine import Engine, ForwardOutput
    from minisgl_core.plugin_api import Event, SamplingMode, StepOutput
    from minisgl_core.scheduler import Scheduler

__all__ = ["Clock", "Instrumentation", "StepKind", "StepTime"]

_T = TypeVar("_T")
Clock = Callable[[], float]
StepKind = Literal["steady", "changed", "prefill"]
"""The kind of a step.

``steady``: a decode pass of the same rows as the previous pass, and no request ended in this step. ``changed``: any
other decode pass. ``prefill``: a prefill pass.
"""


class StepTime(NamedTuple):
    """Host time of one scheduler step in seconds, without waiting for tokens and without the instrumentation.

    On a CPU, which computes while it launches, the launch is excluded as well.
    """

    kind: StepKind
    host: float
    launch: float
    """Part of ``host``: launching the pass, in ``Engine.launch`` and ``Engine.finish``."""


class Instrumentation:
    """Instruments an idle engine and its scheduler for one run, as a context manager. ``clock`` counts seconds."""

    def __init__(self, engine: Engine, scheduler: Scheduler, clock: Clock) -> None:
        self._engine, self._scheduler, self._clock = engine, scheduler, clock
        self._launch_pass, self._finish_pass, self._step = engine.launch, engine.finish, scheduler.step
        self._computes = engine.device.type == "cpu"
        self._events: list[tuple[Event, Event]] = []
        self._rows: np.ndarray | None = None
        self._reset()
        self.passes: list[PassFacts] = []
        self.steps: list[StepTime] = []
        self.first: dict[int, float] = {}
        """Time of the first token, by uid."""
        self.last: dict[int, float] = {}
        """Time of the end, by uid."""
        self.cached_tokens = 0
        """Prompt tokens that were found in the prefix cache."""
        self.tokens: Counter[int] = Counter()
        """By uid."""

    def __enter__(self) -> Instrumentation:
        self._engine.launch = self._timed_launch  # type: ignore[method-assign]
        self._engine.finish = self._timed_finish  # type: ignore[method-assign]
        self._scheduler.step = self._timed_step  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._engine.launch, self._engine.finish, self._scheduler.step

    def device_seconds(self) -> float:
        """Seconds between the first and the last operation of each pass, gaps included, except the one between its
        step and its postprocessing. Call it when all work is done.
        """
        self._engine.platform.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._events) / 1000

    def _reset(self) -> None:
        """Reset at the beginning of a step."""
        self._kind: StepKind | None = None
        self._launch = self._waited = self._measuring = 0.0

    def _timed_step(self) -> TokenOuts:
        self._reset()
        begin = self._clock()
        outs = self._step()
        now = self._clock()
        ended = self._note(outs, now)
        if self._kind is not None:
            kind: StepKind = "changed" if ended and self._kind == "steady" else self._kind
            launch = 0.0 if self._computes else self._launch
            away = self._waited + self._measuring + self._launch - launch
            self.steps.append(StepTime(kind, now - begin - away, launch))
        return outs

    def _note(self, outs: TokenOuts, now: float) -> bool:
        """Has any request ended?"""
        ended = False
        for part in outs.parts:
            if isinstance(part, PromptOut):
                self.cached_tokens += part.cached_tokens
                continue
            uids = ([] if part.token is None else [part.uid]) if isinstance(part, TokenOut) else part.uids
            self.tokens.update(uids)
            for uid in uids:
                self.first.setdefault(uid, now)
            if isinstance(part, TokenOut) and part.finish_reason is not None:
                self.last[part.uid] = now
                ended = True
        return ended

    def _timed_launch(self, batch: Batch, mode: SamplingMode) -> StepOutput:
        entered = self._clock()
        self._note_pass(batch)
        self._measuring += self._clock() - entered
        return self._timed(self._launch_pass, batch, mode)

    def _timed_finish(self, batch: Batch, step: StepOutput) -> ForwardOutput:
        out = self._timed(self._finish_pass, batch, step)
        return out._replace(copied=_TimedWait(out.copied, self._wait))

    def _timed(self, call: Callable[..., _T], *args: Any) -> _T:
        """Part of a pass: ``call(*args)``, with the time that it takes on the host and on the device."""
        entered = self._clock()
        begin, end = (self._engine.platform.new_event(timing=True) for _ in range(2))
        self._events.append((begin, end))
        begin.record()
        launched = self._clock()
        out = call(*args)
        done = self._clock()
        end.record()
        self._launch += done - launched
        self._measuring += launched - entered + self._clock() - done
        return out

    def _note_pass(self, batch: Batch) -> None:
        context = int(batch.cached_lens().sum())
        tokens = int(batch.device_lens().sum()) - context
        self.passes.append(PassFacts(batch.is_decode, tokens, batch.size, context))
        rows = batch.table_idx if batch.is_decode else None
        same = rows is not None and rows is self._rows  # another set of Reqs means another array
        self._kind = "prefill" if batch.is_prefill else "steady" if same else "changed"
        self._rows = rows

    def _wait(self, synchronize: Callable[[], Any]) -> None:
        begin = self._clock()
        synchronize()
        self._waited += self._clock() - begin


class _TimedWait:
    """An event that measures the time spent waiting for it."""

    def __init__(self, event: Event, wait: Callable[[Callable[[], Any]], None]) -> None:
        self._event, self._wait = event, wait

    def synchronize(self) -> None:
        self._wait(self._event.synchronize)
