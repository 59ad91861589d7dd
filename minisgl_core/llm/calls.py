"""Callers that wait for answers, and the router that gives each token to its answer and wakes them."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from minisgl_core.scheduler import Abort, Finish, TokenOut, TokenRun

if TYPE_CHECKING:
    from minisgl_core.scheduler import Message, TokenOuts

    from .output import Output

__all__ = ["Call", "LoopCall", "Router", "ThreadCall"]

STREAM_S: Final = 0.005
"""Between the first chunk of a stream and its end, readers are woken at most this often, because their threads and the
engine's contend for the interpreter.
"""


class Call:
    """The outputs that one caller waits for. A call without outputs waits until its messages have been processed.

    The engine's thread counts ``left`` down and sets ``failure``, then wakes the caller.
    """

    def __init__(self, *, streams: bool = False) -> None:
        self.requests: dict[int, list[Output]] = {}
        """All choices of each request, by the uid of its first choice."""
        self.left = 0
        """Outputs that have not ended."""
        self.streams = streams
        """The caller wants each chunk, not only the end."""
        self.started = False
        """Its first chunk is there."""
        self.failure: BaseException | None = None

    @property
    def outputs(self) -> list[Output]:
        """Outputs of all requests."""
        return [output for choices in self.requests.values() for output in choices]

    def add(self, uid: int, choices: list[Output]) -> None:
        """Wait for one more request."""
        self.requests[uid] = choices
        self.left += len(choices)

    def raise_failure(self) -> None:
        """Raise the error that ended this call early, if any. Each caller gets an exception of its own."""
        if self.failure is not None and (self.left or not self.requests):
            raise _copy_of(self.failure)

    def prepare_wait(self) -> bool:
        """Request to be woken by the next token; False if there is unread output, and no reason to wait."""
        for output in self.outputs:
            output.awaited = True
        return not (self.failure is not None or any(output.has_unread for output in self.outputs))


class ThreadCall(Call):
    """A caller that blocks its thread. Ctrl-C interrupts the wait in the main thread."""

    def __init__(self, *, streams: bool = False) -> None:
        super().__init__(streams=streams)
        self._woken: SimpleQueue[None] = SimpleQueue()
        self.wake = self._woken.put

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait to be woken, perhaps spuriously; raise :class:`queue.Empty` after ``timeout_s``."""
        self._woken.get(timeout=timeout_s)


class LoopCall(Call):
    """A coroutine of an event loop, in which it is made and awaited."""

    def __init__(self, *, streams: bool = False) -> None:
        super().__init__(streams=streams)
        self.loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    async def wait(self) -> None:
        """Wait to be woken, perhaps spuriously."""
        await self._woken.wait()
        self._woken.clear()

    def wake(self) -> None:
        """Wake the coroutine; call it in the loop's thread."""
        self._woken.set()


class Router:
    """The live requests of all callers.

    Callers add and remove theirs from any thread; everything else happens in the engine's thread.
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[Output, Call]] = {}
        """Requests by uid. Threads use only single operations on it, which the interpreter does not interleave."""
        self._ready: dict[Call, None] = {}
        """Callers to wake after this step, or, for readers of streams, soon."""
        self._urgent = False
        """One of these must be woken after this step."""
        self._woken_s = 0.0
        """When callers were last woken, by ``time.monotonic``."""
        self._awaiting_idle: list[Call] = []
        """Callers to wake once the engine is idle, or serves only others."""
        self._replies: list[Message] = []

    def add(self, uid: int, output: Output, call: Call) -> None:
        """Give tokens of ``uid`` to ``output`` from now on."""
        self._live[uid] = (output, call)

    def remove(self, uid: int) -> bool:
        """Drop a request; return whether it was live."""
        return self._live.pop(uid, None) is not None

    # ---- the engine's thread -------------------------------------------------------------------------------------

    def deliver(self, outs: TokenOuts) -> list[Message]:
        """Deliver the output of a step. Returns messages to post in reply."""
        live = self._live
        for part in outs.parts:
            if isinstance(part, TokenRun):
                for uid, token in zip(part.uids, part.tokens, strict=True):
                    found = live.get(uid)
                    if found is None:
                        continue
                    if found[0].add_token(token):
                        self._on_end(uid, *found)
                        self._replies.append(Finish(uid))
                    elif found[0].awaited:
                        self._notify(*found)
            elif isinstance(part, TokenOut):
                self._add(part)
            elif (found := live.get(part.uid)) is not None:
                prompt = found[0].prompt
                prompt.cached_tokens, prompt.logprobs = part.cached_tokens, part.logprobs
                prompt.scheduled_s = time.perf_counter()
        return self._wake_ready()

    def _add(self, out: TokenOut) -> None:
        found = self._live.get(out.uid)
        if found is None:
            return
        output, call = found
        if output.add(out):
            self._replies.append(Finish(out.uid))
        if output.finish_reason is not None:
            self._on_end(out.uid, output, call)
        elif output.awaited:
            self._notify(output, call)

    def _on_end(self, uid: int, output: Output, call: Call) -> None:
        self._live.pop(uid, None)
        call.left -= 1
        if call.streams:
            self._notify(output, call)
            self._urgent = True
        elif call.left == 0:
            self.wake_when_idle(call)

    def _notify(self, output: Output, call: Call) -> None:
        output.awaited = False
        self._ready[call] = None
        if not call.started:
            call.started = self._urgent = True

    def wake_when_idle(self, call: Call) -> None:
        """Wake the caller once the engine is idle or serves only others: all pages of its requests are free then."""
        self._awaiting_idle.append(call)

    def on_idle(self) -> list[Message]:
        """The engine has nothing to do. Returns messages to post in reply."""
        self._wake_awaiting_idle()
        return self._wake_ready()

    def _wake_awaiting_idle(self) -> None:
        self._ready.update(dict.fromkeys(self._awaiting_idle))
        self._awaiting_idle.clear()
        self._urgent = True

    def _wake_ready(self) -> list[Message]:
        if self._awaiting_idle and self._live:
            self._wake_awaiting_idle()
        if self._ready and (self._urgent or time.monotonic() - self._woken_s >= STREAM_S):
            self._woken_s, self._urgent = time.monotonic(), False
            lost, self._ready = _wake(self._ready), {}
            for call in lost:
                self._drop(call)
        replies, self._replies = self._replies, []
        return replies

    def _drop(self, lost: Call) -> None:
        """Abort the requests of a call whose event loop is closed."""
        uids = [uid for uid, (_, call) in list(self._live.items()) if call is lost]
        self._replies += [Abort(uid) for uid in uids if self.remove(uid)]

    def fail(self, error: BaseException) -> None:
        """End every live request with ``error``, and wake every caller that waits."""
        calls = {call: None for _, call in list(self._live.values())}
        calls |= dict.fromkeys(self._awaiting_idle) | self._ready
        self._live.clear()
        self._awaiting_idle.clear()
        self._replies.clear()
        self._ready = {}
        for call in calls:
            call.failure = error
        _wake(calls)


def _wake(calls: Iterable[Call]) -> list[Call]:
    """Wake callers, each event loop once. Returns the calls whose loop is closed."""
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


def _copy_of(error: BaseException) -> BaseException:
    """A copy of ``error``, if it can be copied: a raised exception holds the frames of its callers."""
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
