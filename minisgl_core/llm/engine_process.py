"""An engine in a process of its own: the front process's side, and the engine's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Final

from minisgl_core.errors import EngineError, MinisglError
from minisgl_core.scheduler import TokenOuts

from .channel import CLOSED, Channel
from .child import GRACE_S, Child, end_child, exit_code, start_child
from .engine_loop import EngineLoop
from .process_messages import Failed, Ready, RunningStep, StartEngine, Step, apply_switches
from .runner import Runner
from .transport import Transport

if TYPE_CHECKING:
    from minisgl_core.scheduler import Message, SchedulerStats

    from .calls import Call, Router

__all__ = ["EngineProcess", "run_engine"]

WATCH_S: Final = 1.0
"""How often a step that lasts is reported."""


class EngineProcess(Transport[Ready]):
    """The engine's process, as the one that serves HTTP starts, feeds and ends it.

    A thread starts it and receives a :class:`Step` for each of its steps. Neither process waits for the other. Raises
    what stops the engine's start.
    """

    def __init__(self, start: StartEngine, router: Router) -> None:
        super().__init__(router)
        self._begin = start
        self._channel: Channel | None = None
        self._child: Child | None = None
        self._closing = threading.Event()
        self._death: EngineError | None = None
        self._waiting: dict[int, tuple[Call, float]] = {}
        """Calls whose messages may not have been processed, by their number, and since when they wait."""
        self._answered_s = 0.0
        """When the last step ended, by ``time.monotonic``."""
        self._running_step: RunningStep | None = None
        self._numbers = count()
        ready = self._start()
        assert ready.facts is not None and ready.stats is not None
        self.facts, self._stats = ready.facts, ready.stats

    @property
    def stats(self) -> SchedulerStats:
        return self._stats

    @property
    def running_step(self) -> RunningStep | None:
        return self._running_step

    @property
    def silent_s(self) -> float:
        waits = [since for _, since in list(self._waiting.values())]
        return time.monotonic() - max(min(waits), self._answered_s) if waits else 0.0

    def why_closed(self) -> MinisglError:
        return self._death or super().why_closed()

    def _put(self, messages: Sequence[Message], call: Call | None) -> None:
        number = None
        if call is not None:
            number = next(self._numbers)
            self._waiting[number] = call, time.monotonic()
        assert self._channel is not None
        self._channel.send((messages, number))

    def _request_close(self) -> None:
        self._closing.set()
        if self._channel is not None:
            self._channel.close()

    def _join(self) -> None:
        """Wait, but not for ever for a step to end."""
        self._thread.join(GRACE_S)
        self.kill()
        self._thread.join()

    def _interrupt(self) -> None:
        super()._interrupt()
        self.kill()

    def kill(self) -> None:
        """End the engine's process now. Its ranks end with it."""
        if self._child is not None:
            self._child.process.kill()

    # ---- in the thread ------------------------------------------------------------------------------------------

    def _build(self) -> Ready:
        self._child = start_child("engine")
        self._channel = Channel(self._child.fd)
        self._channel.send(self._begin)
        report = self._channel.get()
        if isinstance(report, Ready):
            return report
        error = report.error if isinstance(report, Failed) else self._how_it_died(self._child)
        self._free()
        raise error

    def _serve(self, built: Ready) -> None:
        assert self._channel is not None
        while (message := self._channel.get()) is not CLOSED:
            if isinstance(message, Step):
                self._stats, self._running_step, self._answered_s = message.stats, None, time.monotonic()
                self._deliver(message, self._channel)
            elif isinstance(message, RunningStep):
                self._running_step = message
            else:
                self._fail(message.error)

    def _deliver(self, step: Step, channel: Channel) -> None:
        for number in step.processed:
            if (waiting := self._waiting.pop(number, None)) is not None:
                self._router.wake_when_idle(waiting[0])
        replies = self._router.deliver(TokenOuts(step.parts))
        if step.idle:
            replies += self._router.on_idle()
        if replies:
            channel.send((replies, None))

    def _end(self, built: Ready) -> None:
        if not self._closing.is_set():
            assert self._child is not None
            self._death = self._how_it_died(self._child)
        self._fail(self.why_closed())
        self._free()

    def _fail(self, error: BaseException) -> None:
        while self._waiting:
            self._router.wake_when_idle(self._waiting.popitem()[1][0])
        self._router.fail(error)

    def _how_it_died(self, child: Child) -> EngineError:
        code = exit_code(child.process)
        return EngineError(
            f"the engine's process died without an exit report, exit code {code}",
            field="process",
            value=child.process.pid,
        )

    def _free(self) -> None:
        assert self._channel is not None and self._child is not None
        self._channel.close()
        end_child(self._child.process, self._child.lifeline, time.monotonic() + GRACE_S)
        self._channel.free()


# ---- in the engine's process -----------------------------------------------------------------------------------------


def run_engine(channel: Channel) -> None:
    """Build the engine on this thread, the process's main thread, and step it until the front process closes."""
    start: StartEngine = channel.get()
    apply_switches(start.switches)
    runner = Runner(start.config, start.tp_size, start.eos_token_ids)
    try:
        channel.send(Ready(runner.facts, runner.scheduler.stats))
        loop = EngineLoop(runner, channel, _Outlet(channel, runner))
        threading.Thread(target=_report_long_steps, args=(loop, channel), name="minisgl-watch", daemon=True).start()
        loop.run()
    finally:
        runner.close()


def _report_long_steps(loop: EngineLoop, channel: Channel) -> None:
    while True:
        time.sleep(WATCH_S)
        step = loop.running_step()
        if step is not None and step.seconds >= WATCH_S:
            channel.send(step)


class _Outlet:
    """Sends the output of each step in one message."""

    def __init__(self, channel: Channel, runner: Runner) -> None:
        self._channel, self._runner = channel, runner
        self._processed: list[int] = []

    def deliver(self, outs: TokenOuts) -> Iterable[Message]:
        self._send(outs, idle=False)
        return ()

    def wake_when_idle(self, call: int) -> None:
        self._processed.append(call)

    def on_idle(self) -> Sequence[Message]:
        self._send(TokenOuts([]), idle=True)
        return ()

    def fail(self, error: BaseException) -> None:
        self._processed.clear()
        self._channel.send(Failed.of(error))

    def _send(self, outs: TokenOuts, *, idle: bool) -> None:
        self._channel.send(Step(outs.parts, self._runner.scheduler.stats, self._processed, idle))
        self._processed = []
