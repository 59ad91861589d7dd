"""How callers wait for the engine: a thread blocks, a coroutine awaits."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .output import Output

__all__ = ["Call", "LoopCall", "ThreadCall", "wake"]


class Call:
    """The outputs that one caller waits for; without any, a pause until what it posted has been done.

    The engine's thread counts ``left`` down and sets ``failure``, then wakes the caller.
    """

    def __init__(self, *, streams: bool = False) -> None:
        self.requests: dict[int, list[Output]] = {}
        """By the uid of its first choice: all choices."""
        self.left = 0
        """Outputs that have not ended."""
        self.streams = streams
        """The caller wants each piece, not only the end."""
        self.begun = False
        """Its first piece is there."""
        self.failure: BaseException | None = None

    @property
    def outputs(self) -> list[Output]:
        """Of all requests."""
        return [output for choices in self.requests.values() for output in choices]

    def add(self, uid: int, choices: list[Output]) -> None:
        """One more request to wait for."""
        self.requests[uid] = choices
        self.left += len(choices)

    def raise_failure(self) -> None:
        """Raise what has ended this call too early, if anything has; each caller gets an exception of its own."""
        if self.failure is not None and (self.left or not self.requests):
            raise _own(self.failure)

    def watch(self) -> bool:
        """Before a caller waits: it is woken by whatever comes next. False if there is something already."""
        for output in self.outputs:
            output.watched = True
        return not (self.failure is not None or any(output.has_news for output in self.outputs))


class ThreadCall(Call):
    """A caller that blocks its thread. Ctrl-C ends the wait in the main thread."""

    def __init__(self, *, streams: bool = False) -> None:
        super().__init__(streams=streams)
        self._woken: SimpleQueue[None] = SimpleQueue()
        self.wake = self._woken.put

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it is woken, which may be for nothing; raises :class:`queue.Empty` after ``timeout_s``."""
        self._woken.get(timeout=timeout_s)


class LoopCall(Call):
    """A coroutine of an event loop; made and awaited there."""

    def __init__(self, *, streams: bool = False) -> None:
        super().__init__(streams=streams)
        self.loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    async def wait(self) -> None:
        """Until it is woken, which may be for nothing."""
        await self._woken.wait()
        self._woken.clear()

    def wake(self) -> None:
        """In the loop's own thread."""
        self._woken.set()


def wake(calls: Iterable[Call]) -> list[Call]:
    """From the engine's thread, once per step. Each event loop is woken once; returns calls whose loop is closed."""
    by_loop: dict[asyncio.AbstractEventLoop, list[LoopCall]] = {}
    lost: list[Call] = []
    for call in calls:
        if isinstance(call, LoopCall):
            by_loop.setdefault(call.loop, []).append(call)
        elif isinstance(call, ThreadCall):
            call.wake(None)
    for loop, ready in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_all, ready)
        except RuntimeError:
            lost += ready
    return lost


def _wake_all(calls: Iterable[LoopCall]) -> None:
    for call in calls:
        call.wake()


def _own(error: BaseException) -> BaseException:
    """A copy, where it can be copied: an exception that is raised holds the frames of its callers."""
    try:
        made = copy.copy(error)
    except Exception:
        return error
    if type(made) is not type(error) or str(made) != str(error):
        return error
    made.__cause__, made.__suppress_context__ = error.__cause__, error.__suppress_context__
    for note in getattr(error, "__notes__", ()):
        if note not in getattr(made, "__notes__", ()):
            made.add_note(note)
    return made.with_traceback(error.__traceback__)
