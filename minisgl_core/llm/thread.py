"""An engine on a thread of its own, which builds it, steps it, and ends it."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from minisgl_core.errors import UsageError

if TYPE_CHECKING:
    from minisgl_core.scheduler import Message

    from .calls import Call
    from .router import Router
    from .runner import Runner

__all__ = ["EngineThread"]

_Item = tuple[Sequence["Message"], "Call | None"]
_START_S: Final = 5.0
"""How long a new thread may take to run its first line."""
_CLOSE: Final[_Item] = ((), None)


class EngineThread:
    """Runs ``build()``'s engine and hands what it brings to ``router``; raises what ``build`` raises.

    The current CUDA device and stream are a thread's own, so one thread does it all. Without work it blocks. It is a
    daemon: the interpreter's end does not wait for it, :meth:`close` does.
    """

    def __init__(self, build: Callable[[], Runner], router: Router) -> None:
        self._router = router
        self._inbox: SimpleQueue[_Item] = SimpleQueue()  # its put() may be interrupted by a finalizer that puts
        self._pid = os.getpid()
        self.closed = False
        """Nothing that is posted from now on is done."""
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
        """From any thread: to be applied before the next step, after which ``call`` is woken as soon as the engine is
        at rest or serves others. False if nothing will happen, for the reason :meth:`why_closed`.
        """
        if os.getpid() != self._pid:
            return False
        self._inbox.put((messages, call))
        return not self.closed

    def why_closed(self) -> UsageError:
        """What to raise where :meth:`post` refuses."""
        ended = "has been shut down" if os.getpid() == self._pid else "belongs to the process that forked this one"
        return UsageError(f"this LLM {ended}", remedy="make a new one")

    def close(self) -> None:
        """From any thread: fail what is live and free the engine. Calling it twice is harmless."""
        if os.getpid() != self._pid:
            return  # the thread stayed in the process that forked this one
        self._inbox.put(_CLOSE)
        if threading.current_thread() is not self._thread:  # it is, where the garbage collector calls from its steps
            self._thread.join()
            error, self._failed_to_close = self._failed_to_close, None
            if error is not None:
                raise error

    def _interrupt(self) -> None:
        """Raise KeyboardInterrupt in the thread, at the next line of Python that it runs."""
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt))

    # ---- the thread itself ---------------------------------------------------------------------------------------

    def _main(self, build: Callable[[], Runner], started: SimpleQueue[Runner | BaseException]) -> None:
        self._running.set()
        try:
            runner = build()
        except BaseException as error:
            self.closed = True
            started.put(error)
            return
        started.put(runner)
        with suppress(KeyboardInterrupt):  # that of `_interrupt`, where the start was over before it came
            self._serve(runner)
        try:
            self._end(runner)
        except BaseException as error:
            self._failed_to_close = error

    def _serve(self, runner: Runner) -> None:
        """Until it is closed. After a failed step whatever comes is answered with that failure."""
        while self._take_posts(runner):
            try:
                replies = self._router.deliver(runner.step())
            except BaseException as error:
                self._router.fail(error)
                continue
            for message in replies:
                runner.post(message)

    def _take_posts(self, runner: Runner) -> bool:
        """Take what was posted; without work wait for more. False = close."""
        while True:
            if self._inbox.empty():
                if runner.has_work and runner.usable:
                    return True
                replies = self._router.at_rest()
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
                self._router.rest(call)
            if messages and not runner.usable:
                return True  # the step says what has failed

    def _end(self, runner: Runner) -> None:
        self.closed = True  # before the last look at what is live: who comes later looks at this
        while not self._inbox.empty():
            _, call = self._inbox.get()
            if call is not None:
                self._router.rest(call)
        self._router.fail(self.why_closed())
        runner.close()
