"""An engine that many callers use at once, from any thread and any event loop."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from minisgl_core.scheduler import Abort, ClearCache, NewReq

from .output import Output, PromptFacts, completion
from .router import Router
from .runner import Runner
from .thread import EngineThread

if TYPE_CHECKING:
    from minisgl_core.engine import Engine, EngineConfig
    from minisgl_core.scheduler import Message, Scheduler
    from minisgl_core.tokenizer import Tokenizer

    from .answers import Completion
    from .calls import Call
    from .prompts import PreparedPrompt

__all__ = ["AsyncEngine"]


class AsyncEngine:
    """All ranks of an engine, stepped elsewhere; requests of all callers are served together.

    Scheduler and engine know one thread, which a transport runs: it takes messages, and brings what each step brought
    to a :class:`Router`. Callers wait in a :class:`Call`. Garbage collection and the interpreter's end close it.

    Raises what the start raises. ``tokenizer`` None: answers have no text.
    """

    def __init__(self, config: EngineConfig, tp_size: int = 1, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer
        eos_token_ids = frozenset(tokenizer.eos_token_ids if tokenizer else ())
        self._router = Router()
        self._transport = EngineThread(lambda: Runner(config, tp_size, eos_token_ids), self._router)
        self._close = weakref.finalize(self, self._transport.close)
        self._lock = threading.Lock()
        self._next_uid = 0

    @property
    def engine(self) -> Engine:
        """Rank 0's engine."""
        return self._transport.runner.engine

    @property
    def scheduler(self) -> Scheduler:
        """Rank 0's scheduler."""
        return self._transport.runner.scheduler

    def submit(self, prepared: Iterable[PreparedPrompt], call: Call) -> None:
        """Start to answer prompts for ``call``, which must not wait if there are none. Raises :class:`UsageError` after
        the end.
        """
        messages: list[Message] = []
        for input_ids, params in prepared:
            with self._lock:
                uid, self._next_uid = self._next_uid, self._next_uid + params.n
            prompt = PromptFacts(len(input_ids))
            call.add(uid, [Output(params, self.tokenizer, prompt, choice, input_ids) for choice in range(params.n)])
            messages.append(NewReq(uid, input_ids, params))
        for first, choices in call.requests.items():
            for uid, output in enumerate(choices, first):
                self._router.add(uid, output, call)
        if not self._transport.post(messages):
            self._remove(call)
            raise self._transport.why_closed()

    def abort(self, call: Call, then: Call | None = None) -> bool:
        """Abort what still runs of ``call``; wakes ``then`` once its pages are free. False if that will not happen."""
        aborts = self._remove(call)
        return bool(aborts or then) and self._transport.post(aborts, then)

    def completions(self, call: Call) -> list[Completion]:
        """The answers to its prompts, in their order."""
        return [completion(choices, self.tokenizer) for choices in call.requests.values()]

    def clear_cache(self, then: Call) -> None:
        """Forget every cached prefix that no running request uses, on all ranks, and wake ``then``."""
        if not self._transport.post([ClearCache()], then):
            raise self._transport.why_closed()

    def close(self) -> None:
        """End all ranks and give all memory back; calls that wait get a :class:`UsageError`. Calling it twice is
        harmless.
        """
        self._close()

    def _remove(self, call: Call) -> list[Abort]:
        """What ends those of its requests that are live."""
        sizes = {uid: len(choices) for uid, choices in call.requests.items()}
        return [Abort(uid, n) for uid, n in sizes.items() if sum(map(self._router.remove, range(uid, uid + n)))]
