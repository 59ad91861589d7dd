"""Which answer each token belongs to, and who is to hear of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from minisgl_core.scheduler import Abort, Finish, TokenOut, TokenRun

from .calls import Call, wake

if TYPE_CHECKING:
    from minisgl_core.scheduler import Message, TokenOuts

    from .output import Output

__all__ = ["Router"]

STREAM_S: Final = 0.005
"""Between the first piece of a stream and its end, readers are woken at most this often: each time, their threads and
the engine's contend for the interpreter.
"""


class Router:
    """The live requests of all callers.

    Callers add and remove theirs from any thread; everything else happens in the thread that brings the tokens.
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[Output, Call]] = {}
        """By uid. Only single operations on it, which the interpreter does not interleave."""
        self._ready: dict[Call, None] = {}
        """To be woken after this step, or where they read streams, soon."""
        self._urgent = False
        """One of them must be woken after this step."""
        self._woken_s = 0.0
        """When callers were woken last, by ``time.monotonic``."""
        self._resting: list[Call] = []
        """To be woken once the engine is at rest, or busy with the requests of others."""
        self._replies: list[Message] = []

    def add(self, uid: int, output: Output, call: Call) -> None:
        """From now on tokens of ``uid`` go to ``output``."""
        self._live[uid] = (output, call)

    def remove(self, uid: int) -> bool:
        """Was it live?"""
        return self._live.pop(uid, None) is not None

    # ---- the thread that brings the tokens -----------------------------------------------------------------------

    def deliver(self, outs: TokenOuts) -> list[Message]:
        """What a step brought. Returns what is to be posted in answer."""
        live = self._live
        for part in outs.parts:
            if isinstance(part, TokenRun):
                for uid, token in zip(part.uids, part.tokens, strict=True):
                    found = live.get(uid)
                    if found is None:
                        continue
                    if found[0].add_token(token):
                        self._ended(uid, *found)
                        self._replies.append(Finish(uid))
                    elif found[0].watched:
                        self._news(*found)
            elif isinstance(part, TokenOut):
                self._add(part)
            elif (found := live.get(part.uid)) is not None:
                prompt = found[0].prompt
                prompt.cached_tokens, prompt.logprobs = part.cached_tokens, part.logprobs
        return self._wake_ready()

    def _add(self, out: TokenOut) -> None:
        found = self._live.get(out.uid)
        if found is None:
            return
        output, call = found
        if output.add(out):
            self._replies.append(Finish(out.uid))
        if output.finish_reason is not None:
            self._ended(out.uid, output, call)
        elif output.watched:
            self._news(output, call)

    def _ended(self, uid: int, output: Output, call: Call) -> None:
        self._live.pop(uid, None)
        call.left -= 1
        if call.streams:
            self._news(output, call)
            self._urgent = True
        elif call.left == 0:
            self.rest(call)

    def _news(self, output: Output, call: Call) -> None:
        output.watched = False
        self._ready[call] = None
        if not call.begun:
            call.begun = self._urgent = True

    def rest(self, call: Call) -> None:
        """Wake the caller once nothing is left to do but the work of others: then it finds all its pages free."""
        self._resting.append(call)

    def at_rest(self) -> list[Message]:
        """The engine has nothing to do."""
        self._wake_resting()
        return self._wake_ready()

    def _wake_resting(self) -> None:
        self._ready.update(dict.fromkeys(self._resting))
        self._resting.clear()
        self._urgent = True

    def _wake_ready(self) -> list[Message]:
        if self._resting and self._live:
            self._wake_resting()
        if self._ready and (self._urgent or time.monotonic() - self._woken_s >= STREAM_S):
            self._woken_s, self._urgent = time.monotonic(), False
            lost, self._ready = wake(self._ready), {}
            for call in lost:
                self._drop(call)
        replies, self._replies = self._replies, []
        return replies

    def _drop(self, lost: Call) -> None:
        """Its event loop is closed: abort what it waits for."""
        uids = [uid for uid, (_, call) in list(self._live.items()) if call is lost]
        self._replies += [Abort(uid) for uid in uids if self.remove(uid)]

    def fail(self, error: BaseException) -> None:
        """Nothing more will come for any live request; every caller that waits hears why."""
        calls = {call: None for _, call in list(self._live.values())}
        calls |= dict.fromkeys(self._resting) | self._ready
        self._live.clear()
        self._resting.clear()
        self._replies.clear()
        self._ready = {}
        for call in calls:
            call.failure = error
        wake(calls)
