"""An engine that many callers use at once, from any thread and any event loop."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from minisgl_core.errors import UsageError
from minisgl_core.scheduler import Abort, ClearCache, NewReq

from .calls import Router
from .engine_process import EngineProcess
from .engine_thread import EngineThread
from .output import Output, PromptFacts, completion
from .process_messages import EngineFacts, StartEngine, read_switches
from .runner import Runner

if TYPE_CHECKING:
    from minisgl_core.engine import Engine, EngineConfig
    from minisgl_core.scheduler import Message, Scheduler, SchedulerStats
    from minisgl_core.tokenizer import Tokenizer

    from .calls import Call
    from .output import Completion
    from .prompts import PreparedPrompt

__all__ = ["AsyncEngine"]


class AsyncEngine:
    """All ranks of an engine, on an :class:`EngineThread` or, with ``own_process``, in an :class:`EngineProcess`;
    requests of all callers are served together.

    Callers post messages and wait in a :class:`Call`; a :class:`Router` gives them the output of each step. Garbage
    collection and the interpreter's exit close it. ``tokenizer`` None: answers have no text.

    Raises what the start raises.
    """

    def __init__(
        self,
        config: EngineConfig,
        tp_size: int = 1,
        tokenizer: Tokenizer | None = None,
        *,
        own_process: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        eos_token_ids = frozenset(tokenizer.eos_token_ids if tokenizer else ())
        self._router = Router()
        self._transport: EngineThread | EngineProcess
        if own_process:
            start = StartEngine(config, tp_size, eos_token_ids, read_switches())
            self._transport = EngineProcess(start, self._router)
        else:
            self._transport = EngineThread(lambda: Runner(config, tp_size, eos_token_ids), self._router)
        self._close = weakref.finalize(self, self._transport.close)
        self._lock = threading.Lock()
        self._next_uid = 0

    @property
    def facts(self) -> EngineFacts:
        """Plan, settings and limits."""
        return self._transport.facts

    @property
    def stats(self) -> SchedulerStats:
        """Rank 0's; from another process, those of its last step."""
        return self._transport.stats

    @property
    def engine(self) -> Engine:
        """Rank 0's engine. Raises :class:`UsageError` if it is in another process."""
        return self._runner.engine

    @property
    def scheduler(self) -> Scheduler:
        """Rank 0's scheduler. Raises like :attr:`engine`."""
        return self._runner.scheduler

    @property
    def _runner(self) -> Runner:
        if isinstance(self._transport, EngineProcess):
            raise UsageError("the engine runs in a process of its own", remedy="read its `plan`, `limits` and `stats`")
        return self._transport.runner

    def hanging(self, after_s: float) -> str | None:
        """What the engine does, if it has not ended a step or answered a waiting call for ``after_s``; else None."""
        silent, step = self._transport.silent_s, self._transport.running_step
        if silent < after_s:
            return None
        return f"the engine has not answered for {silent:.0f} s" if step is None else f"{step}\n{step.stack}"

    def submit(self, prepared: Iterable[PreparedPrompt], call: Call) -> None:
        """Submit prompts of ``call``, which must not wait if there are none. Raises :class:`UsageError` when closed."""
        messages: list[Message] = []
        for input_ids, params, priority, shown in prepared:
            with self._lock:
                uid, self._next_uid = self._next_uid, self._next_uid + params.n
            prompt = PromptFacts(len(input_ids))
            outputs = [Output(params, self.tokenizer, prompt, n, input_ids, shown) for n in range(params.n)]
            call.add(uid, outputs)
            messages.append(NewReq(uid, input_ids, params, priority))
        for first, choices in call.requests.items():
            for uid, output in enumerate(choices, first):
                self._router.add(uid, output, call)
        if not self._transport.post(messages):
            self._remove(call)
            raise self._transport.why_closed()

    def abort(self, call: Call, then: Call | None = None) -> bool:
        """Abort the live requests of ``call`` and wake ``then`` once their pages are free. False if it will not be."""
        aborts = self._remove(call)
        return bool(aborts or then) and self._transport.post(aborts, then)

    def completions(self, call: Call) -> list[Completion]:
        """The answers to the prompts of ``call``, in their order."""
        return [completion(choices, self.tokenizer) for choices in call.requests.values()]

    def clear_cache(self, then: Call) -> None:
        """Drop every cached prefix that no running request uses, on all ranks, and wake ``then``."""
        if not self._transport.post([ClearCache()], then):
            raise self._transport.why_closed()

    def check_process(self) -> None:
        """Raise :class:`UsageError` in a process forked from the engine's, where no call would ever be woken."""
        self._transport.check_process()

    def ping(self, then: Call) -> None:
        """Wake ``then`` once the engine has ended the step that it is in, or at once if it rests."""
        if not self._transport.post([], then):
            raise self._transport.why_closed()

    def close(self) -> None:
        """End all ranks and free all memory; calls that wait get a :class:`UsageError`. Calling it twice is
        harmless.
        """
        self._close()

    def kill(self) -> None:
        """End the process of the engine without waiting for its step; calls that wait get an :class:`EngineError`."""
        assert isinstance(self._transport, EngineProcess)
        self._transport.kill()

    def _remove(self, call: Call) -> list[Abort]:
        """Drop the requests of ``call``; returns messages that end those that are live."""
        sizes = {uid: len(choices) for uid, choices in call.requests.items()}
        return [Abort(uid, n) for uid, n in sizes.items() if sum(map(self._router.remove, range(uid, uid + n)))]
