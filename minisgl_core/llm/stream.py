"""One answer piece by piece, for a thread or for a coroutine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

from .calls import LoopCall, ThreadCall

if TYPE_CHECKING:
    from .answers import Chunk, Completion
    from .async_engine import AsyncEngine
    from .calls import Call
    from .prompts import PreparedPrompt

__all__ = ["AsyncStream", "Stream"]


class _Pieces:
    """What of a call's outputs its reader has not seen."""

    _open = False

    def __init__(self, engine: AsyncEngine, call: Call, prepared: Sequence[PreparedPrompt]) -> None:
        self._engine, self._call = engine, call
        self._open = True  # before the start: Ctrl-C may come in the middle of it
        engine.submit(prepared, call)
        self._unread = list(call.outputs)

    def completion(self) -> Completion:
        """The answer as far as it has come, with what is known of its prompt."""
        (answer,) = self._engine.completions(self._call)
        return answer

    def _next_chunk(self) -> Chunk | None:
        """None if there is nothing new; then it is looked for once more before the reader waits."""
        for output in self._unread:
            chunk = output.take()
            if chunk is not None:
                if chunk.finish_reason is not None:
                    self._unread.remove(output)
                return chunk
        self._call.raise_failure()
        return None

    def __del__(self) -> None:
        if self._open:
            self._engine.abort(self._call)


class Stream(_Pieces, Iterator["Chunk"]):
    """Chunks as they come; several that came meanwhile are one. The engine does not wait for the reader."""

    def __init__(self, engine: AsyncEngine, prepared: Sequence[PreparedPrompt]) -> None:
        self._thread_call = ThreadCall(streams=True)
        super().__init__(engine, self._thread_call, prepared)

    def __next__(self) -> Chunk:
        try:
            while self._open and self._unread:
                if (chunk := self._next_chunk()) is not None:
                    return chunk
                if self._call.watch():
                    self._thread_call.wait()
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Abort the request if it still runs, and wait until its pages are free. From any thread: one that is reading
        finds the end of the stream. Calling it twice is harmless.
        """
        if self._open:
            self._open = False
            self._thread_call.wake(None)  # another thread may be reading
            rest = ThreadCall()
            if self._engine.abort(self._call, rest):
                rest.wait()


class AsyncStream(_Pieces, AsyncIterator["Chunk"]):
    """As :class:`Stream`, for the event loop that it was made in. A cancelled reader aborts the request."""

    def __init__(self, engine: AsyncEngine, prepared: Sequence[PreparedPrompt]) -> None:
        self._loop_call = LoopCall(streams=True)
        super().__init__(engine, self._loop_call, prepared)

    async def __anext__(self) -> Chunk:
        try:
            while self._open and self._unread:
                if (chunk := self._next_chunk()) is not None:
                    return chunk
                if self._call.watch():
                    await self._loop_call.wait()
        except BaseException:
            self._abort()
            raise
        self._abort()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort the request if it still runs; a task that is reading finds the end of the stream. Calling it twice is
        harmless.
        """
        self._abort()

    def _abort(self) -> None:
        if self._open:
            self._open = False
            self._loop_call.wake()  # another task may be reading
            self._engine.abort(self._call)
