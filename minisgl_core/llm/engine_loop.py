"""The loop that steps an engine, whichever thread or process it runs in."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .channel import CLOSED
from .process_messages import RunningStep

if TYPE_CHECKING:
    from minisgl_core.scheduler import Message, TokenOuts

    from .runner import Runner

__all__ = ["EngineLoop", "Inbox", "Item", "Outlet"]

Item = tuple[Sequence["Message"], Any]
"""Messages to apply before the next step, and the call to wake once they have been processed, or None."""
C_contra = TypeVar("C_contra", contravariant=True)


class Inbox(Protocol):
    """Where items arrive. :data:`~minisgl_core.llm.channel.CLOSED` ends the loop."""

    def empty(self) -> bool: ...

    def get(self) -> Any: ...


class Outlet(Protocol[C_contra]):
    """What the engine's output is passed to. Messages that it returns are posted in reply."""

    def deliver(self, outs: TokenOuts) -> Iterable[Message]: ...

    def wake_when_idle(self, call: C_contra) -> None: ...

    def on_idle(self) -> Sequence[Message]: ...

    def fail(self, error: BaseException) -> None: ...


class EngineLoop:
    """Steps ``runner`` while there is work, and otherwise waits for the inbox."""

    def __init__(self, runner: Runner, inbox: Inbox, outlet: Outlet[Any]) -> None:
        self._runner, self._inbox, self._outlet = runner, inbox, outlet
        self._steps = 0
        self._began: float | None = None
        """When the step began that runs now, by ``time.monotonic``."""
        self._thread = 0

    def run(self) -> None:
        """Step until closed. After a failed step all further requests fail with the same error."""
        self._thread = threading.get_ident()
        while self._receive():
            self._steps += 1
            self._began = time.monotonic()
            try:
                outs = self._runner.step()
                self._began = None
                replies = self._outlet.deliver(outs)
            except BaseException as error:
                self._began = None
                self._outlet.fail(error)
                continue
            for message in replies:
                self._runner.post(message)

    def running_step(self) -> RunningStep | None:
        """The step that runs now, as another thread sees it; None between two steps."""
        began, frame = self._began, sys._current_frames().get(self._thread)
        if began is None or frame is None:
            return None
        stats, stack = self._runner.scheduler.stats, traceback.format_stack(frame)
        return RunningStep(self._steps, time.monotonic() - began, stats.running, stats.waiting, "".join(stack))

    def _receive(self) -> bool:
        """Take the posted messages; without work wait for more. False = close."""
        runner = self._runner
        while True:
            if self._inbox.empty():
                if runner.has_work and runner.usable:
                    return True
                replies = self._outlet.on_idle()
                if runner.usable and replies:
                    for message in replies:
                        runner.post(message)
                    continue
            item = self._inbox.get()
            if item is CLOSED:
                return False
            messages, call = item
            for message in messages:
                runner.post(message)
            if call is not None:
                self._outlet.wake_when_idle(call)
                runner.check()
            if not runner.usable:
                return True  # the step raises the failure again
