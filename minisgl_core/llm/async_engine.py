"""An engine on a thread of its own, which many callers use at once, from any thread and any event loop."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from minisgl_core.errors import UsageError
from minisgl_core.scheduler import Abort, ClearCache, NewReq

from .calls import Router
from .output import Output, PromptFacts, completion
from .runner import Runner

if TYPE_CHECKING:
    from minisgl_core.engine import Engine, EngineConfig
    from minisgl_core.scheduler import Message, Scheduler
    from minisgl_core.tokenizer import Tokenizer

    from .calls import Call
    from .output import Completion
    from .prompts import PreparedPrompt

__all__ = ["AsyncEngine", "EngineThread"]

_Item = tuple[Sequence["Message"], "Call | None"]
_START_S: Final = 5.0
"""How long a new thread may take to run its first line."""
_CLOSE: Final[_Item] = ((), None)


class EngineThread:
    """Builds an engine, steps it while there is work, passes its output to ``router``, and frees it at the end.

    The current CUDA device and stream belong to a thread, so one thread does all of this. Without work it blocks. It is
    a daemon: the interpreter's exit does not wait for it, :meth:`close` does. Raises what ``build`` raises.
    """

    def __init__(self, build: Callable[[], Runner], router: Router) -> None:
        self._router = router
        self._inbox: SimpleQueue[_Item] = SimpleQueue()  # its put() may be interrupted by a finalizer that puts
        self._pid = os.getpid()
        self.closed = False
        """What is posted from now on is ignored."""
        self._running = threading.Event()
        self._failed_to_close: BaseException | None = None
        started: SimpleQueue[Runner | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, args=(build, started), name="minisgl-engine", daemon=True)
        try:
            self._thread.start()
            outcome = started.get()
        except BaseException:  # Ctrl-C while the model is loaded
            if self._running.wait(_START_S):
                self._interrupt()
                self.close()
            raise
        if isinstance(outcome, BaseException):
            self._thread.join()
            raise outcome
        self.runner = outcome

    def post(self, messages: Sequence[Message], call: Call | None = None) -> bool:
        """Apply ``messages`` before the next step, then wake ``call`` as soon as the engine is idle or
        serves only others. False if they are ignored, for the reason :meth:`why_closed`.
        """
        if os.getpid() != self._pid:
            return False
        self._inbox.put((messages, call))
        return not self.closed

    def why_closed(self) -> UsageError:
        """The error to raise where :meth:`post` returns False."""
        ended = "has been shut down" if os.getpid() == self._pid else "belongs to the process that forked this one"
        return UsageError(f"this LLM {ended}", remedy="make a new one")

    def check_process(self) -> None:
        """Raise :class:`UsageError` in a process forked from the engine's: the thread exists only there."""
        if os.getpid() != self._pid:
            raise self.why_closed()

    def close(self) -> None:
        """Fail what is live and free the engine. Any thread may call it, and more than once."""
        if os.getpid() != self._pid:
            return  # the thread stayed in the process that forked this one
        self._inbox.put(_CLOSE)
        if threading.current_thread() is not self._thread:  # else the garbage collector runs during a step
            self._thread.join()
            error, self._failed_to_close = self._failed_to_close, None
            if error is not None:
                raise error

    def _interrupt(self) -> None:
        """Raise KeyboardInterrupt in the thread, at its next line of Python."""
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt))

    # ---- in the thread ------------------------------------------------------------------------------------------

    def _main(self, build: Callable[[], Runner], started: SimpleQueue[Runner | BaseException]) -> None:
        self._running.set()
        try:
            runner = build()
        except BaseException as error:
            self.closed = True
            started.put(error)
            return
        started.put(runner)
        with suppress(KeyboardInterrupt):  # from `_interrupt`, if the start was complete before it came
            self._serve(runner)
        try:
            self._end(runner)
        except BaseException as error:
            self._failed_to_close = error

    def _serve(self, runner: Runner) -> None:
        """Step until closed. After a failed step all further requests fail with the same error."""
        while self._receive(runner):
            try:
                replies = self._router.deliver(runner.step())
            except BaseException as error:
                self._router.fail(error)
                continue
            for message in replies:
                runner.post(message)

    def _receive(self, runner: Runner) -> bool:
        """Take the posted messages; without work wait for more. False = close."""
        while True:
            if self._inbox.empty():
                if runner.has_work and runner.usable:
                    return True
                replies = self._router.on_idle()
                if runner.usable and replies:
                    for message in replies:
                        runner.post(message)
                    continue
            item = self._inbox.get()
            if item is _CLOSE:
                return False
            messages, call = item
            for message in messages:
                runner.post(message)
            if call is not None:
                self._router.wake_when_idle(call)
                runner.check()
            if not runner.usable:
                return True  # the step raises the failure again

    def _end(self, runner: Runner) -> None:
        self.closed = True  # before the live requests are failed: callers that come later check this
        while not self._inbox.empty():
            _, call = self._inbox.get()
            if call is not None:
                self._router.wake_when_idle(call)
        self._router.fail(self.why_closed())
        runner.close()


class AsyncEngine:
    """All ranks of an engine, on an :class:`EngineThread`; requests of all callers are served together.

    Callers post messages and wait in a :class:`Call`; a :class:`Router` gives them the output of each step. Garbage
    collection and the interpreter's exit close it. ``tokenizer`` None: answers have no text.

    Raises what the start raises.
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
        """Submit prompts of ``call``, which must not wait if there are none. Raises :class:`UsageError` when closed."""
        messages: list[Message] = []
        for input_ids, params, priority in prepared:
            with self._lock:
                uid, self._next_uid = self._next_uid, self._next_uid + params.n
            prompt = PromptFacts(len(input_ids))
            call.add(uid, [Output(params, self.tokenizer, prompt, choice, input_ids) for choice in range(params.n)])
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

    def _remove(self, call: Call) -> list[Abort]:
        """Drop the requests of ``call``; returns messages that end those that are live."""
        sizes = {uid: len(choices) for uid, choices in call.requests.items()}
        return [Abort(uid, n) for uid, n in sizes.items() if sum(map(self._router.remove, range(uid, uid + n)))]
