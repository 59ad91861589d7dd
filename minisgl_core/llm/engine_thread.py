"""An engine on a thread of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

from .channel import CLOSED
from .engine_loop import EngineLoop, Item
from .process_messages import EngineFacts
from .runner import Runner
from .transport import Transport

if TYPE_CHECKING:
    from minisgl_core.scheduler import Message, SchedulerStats

    from .calls import Call, Router
    from .process_messages import RunningStep

__all__ = ["EngineThread"]


class EngineThread(Transport[Runner]):
    """Builds an engine, steps it while there is work, and frees it at the end.

    The current CUDA device and stream belong to a thread, so one thread does all of this. Without work it blocks.
    Raises what ``build`` raises.
    """

    def __init__(self, build: Callable[[], Runner], router: Router) -> None:
        super().__init__(router)
        self._build_runner = build
        self._inbox: SimpleQueue[Item] = SimpleQueue()  # its put() may be interrupted by a finalizer that puts
        self._loop: EngineLoop | None = None
        self.runner = self._start()
        self.facts: EngineFacts = self.runner.facts

    @property
    def stats(self) -> SchedulerStats:
        return self.runner.scheduler.stats

    @property
    def running_step(self) -> RunningStep | None:
        return None if self._loop is None else self._loop.running_step()

    @property
    def silent_s(self) -> float:
        step = self.running_step
        return 0.0 if step is None else step.seconds

    def _put(self, messages: Sequence[Message], call: Call | None) -> None:
        self._inbox.put((messages, call))

    def _request_close(self) -> None:
        self._inbox.put(CLOSED)

    # ---- in the thread ------------------------------------------------------------------------------------------

    def _build(self) -> Runner:
        return self._build_runner()

    def _serve(self, built: Runner) -> None:
        self._loop = EngineLoop(built, self._inbox, self._router)
        self._loop.run()

    def _end(self, built: Runner) -> None:
        while not self._inbox.empty():
            if (item := self._inbox.get()) is not CLOSED and item[1] is not None:
                self._router.wake_when_idle(item[1])
        self._router.fail(self.why_closed())
        built.close()
