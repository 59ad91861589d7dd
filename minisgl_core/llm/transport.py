"""How callers reach an engine: the part that :class:`EngineThread` and :class:`EngineProcess` have in common."""

from __future__ import annotations

import ctypes
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from minisgl_core.errors import MinisglError, UsageError

if TYPE_CHECKING:
    from minisgl_core.scheduler import Message, SchedulerStats

    from .calls import Call, Router
    from .process_messages import EngineFacts, RunningStep

__all__ = ["Transport"]

T = TypeVar("T")
_START_S: Final = 5.0
"""How long a new thread may take to run its first line."""


class Transport(ABC, Generic[T]):
    """A thread that starts an engine, passes its output to ``router``, and ends it.

    It is a daemon: the interpreter's exit does not wait for it, :meth:`close` does.
    """

    facts: EngineFacts

    def __init__(self, router: Router) -> None:
        self._router = router
        self._pid = os.getpid()
        self.closed = False
        """What is posted from now on is ignored."""
        self._failed_to_close: BaseException | None = None
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._main, name="minisgl-engine", daemon=True)
        self._started: SimpleQueue[T | BaseException] = SimpleQueue()

    def post(self, messages: Sequence[Message], call: Call | None = None) -> bool:
        """Apply ``messages`` before the next step, then wake ``call`` as soon as the engine is idle or
        serves only others. False if they are ignored, for the reason :meth:`why_closed`.
        """
        if os.getpid() != self._pid:
            return False
        self._put(messages, call)
        return not self.closed

    def why_closed(self) -> MinisglError:
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
        self._request_close()
        if threading.current_thread() is not self._thread:  # else the garbage collector runs during a step
            self._join()
            error, self._failed_to_close = self._failed_to_close, None
            if error is not None:
                raise error

    @property
    @abstractmethod
    def stats(self) -> SchedulerStats:
        """Rank 0's, as far as they are known."""

    @property
    @abstractmethod
    def running_step(self) -> RunningStep | None:
        """The step that runs now, if it is known."""

    @property
    @abstractmethod
    def silent_s(self) -> float:
        """How long the engine has neither ended a step nor answered a call that waits."""

    @abstractmethod
    def _put(self, messages: Sequence[Message], call: Call | None) -> None:
        """Send an item to the engine. Must not wait."""

    @abstractmethod
    def _request_close(self) -> None:
        """Make the thread end."""

    def _join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()

    def _start(self) -> T:
        """Start the thread, and return what :meth:`_build` returns. Raises what it raises."""
        try:
            self._thread.start()
            outcome = self._started.get()
        except BaseException:  # Ctrl-C while the model is loaded
            if self._running.wait(_START_S):
                self._interrupt()
                self.close()
            raise
        if isinstance(outcome, BaseException):
            self._thread.join()
            raise outcome
        return outcome

    def _interrupt(self) -> None:
        """Raise KeyboardInterrupt in the thread, at its next line of Python."""
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt))

    # ---- in the thread ------------------------------------------------------------------------------------------

    def _main(self) -> None:
        self._running.set()
        try:
            built = self._build()
        except BaseException as error:
            self.closed = True
            self._started.put(error)
            return
        self._started.put(built)
        with suppress(KeyboardInterrupt):  # from `_interrupt`, if the start was complete before it came
            self._serve(built)
        try:
            self.closed = True  # before the live requests are failed: callers that come later check this
            self._end(built)
        except BaseException as error:
            self._failed_to_close = error

    @abstractmethod
    def _build(self) -> T:
        """Start the engine."""

    @abstractmethod
    def _serve(self, built: T) -> None:
        """Pass on its output until it is to end."""

    @abstractmethod
    def _end(self, built: T) -> None:
        """Fail what is live, and free the engine."""
