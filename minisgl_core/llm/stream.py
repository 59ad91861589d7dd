"""Streams of one answer, for a thread or for a coroutine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from .calls import LoopCall, ThreadCall

if TYPE_CHECKING:
    from .async_engine import AsyncEngine
    from .calls import Call
    from .output import Chunk, Completion, Output, PromptFacts
    from .prompts import PreparedPrompt

__all__ = ["AsyncStream", "Stream"]


class _BaseStream:
    """The part of a call's outputs that its reader has not read."""

    _open = False

    def __init__(self, engine: AsyncEngine, call: Call) -> None:
        self._engine, self._call = engine, call
        self._unread: list[Output] = []

    def _submit(self, prepared: Sequence[PreparedPrompt]) -> None:
        self._open = True  # before the submission, which Ctrl-C may interrupt
        self._engine.submit(prepared, self._call)
        self._unread = list(self._call.outputs)

    @property
    def prompt(self) -> PromptFacts:
        """Facts about the prompt, as far as the engine has reported them."""
        return self._call.outputs[0].prompt

    def completion(self) -> Completion:
        """The answer so far, with the facts about its prompt."""
        (answer,) = self._engine.completions(self._call)
        return answer

    def _next_chunk(self) -> Chunk | None:
        """None if there is nothing new. The reader then looks once more before it waits."""
        for output in self._unread:
            chunk = output.take()
            if chunk is not None:
                if chunk.finish_reason is not None:
                    self._unread.remove(output)
                return chunk
        self._call.raise_failure()
        return None

    def _must_wait(self) -> bool:
        """Whether the next chunk is still to come; raise :class:`UsageError` where it never will."""
        self._engine.check_process()
        return self._call.prepare_wait()

    def __del__(self) -> None:
        if self._open:
            self._engine.abort(self._call)


class Stream(_BaseStream, Iterator["Chunk"]):
    """Yields chunks as they arrive; what arrived meanwhile is one chunk. The engine never waits for the reader."""

    def __init__(self, engine: AsyncEngine, prepared: Sequence[PreparedPrompt]) -> None:
        self._thread_call = ThreadCall(streams=True)
        super().__init__(engine, self._thread_call)
        self._submit(prepared)

    def __next__(self) -> Chunk:
        try:
            while self._open and self._unread:
                if (chunk := self._next_chunk()) is not None:
                    return chunk
                if self._must_wait():
                    self._thread_call.wait()
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Abort the request if it still runs, and wait until its pages are free. May be called from any thread: for a
        thread that is reading, the stream ends. Calling it twice is harmless.
        """
        if self._open:
            self._open = False
            self._thread_call.wake(None)  # another thread may be reading
            rest = ThreadCall()
            if self._engine.abort(self._call, rest):
                rest.wait()


class AsyncStream(_BaseStream, AsyncIterator["Chunk"]):
    """Like :class:`Stream`, for the event loop in which it was made. Cancelling its reader aborts the request.

    ``checked``: returns what to submit, or raises; it is awaited by the first reader.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prepared: Sequence[PreparedPrompt],
        checked: Callable[[], Awaitable[Sequence[PreparedPrompt]]] | None = None,
    ) -> None:
        self._loop_call = LoopCall(streams=True)
        self._checked = checked
        super().__init__(engine, self._loop_call)
        if checked is None:
            self._submit(prepared)

    async def __anext__(self) -> Chunk:
        if self._checked is not None:
            checked, self._checked = self._checked, None
            self._submit(await checked())
        try:
            while self._open and self._unread:
                if (chunk := self._next_chunk()) is not None:
                    return chunk
                if self._must_wait():
                    await self._loop_call.wait()
        except BaseException:
            self._abort()
            raise
        self._abort()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort the request if it still runs. For a task that is reading, the stream ends. May be called twice."""
        self._checked = None
        self._abort()

    def _abort(self) -> None:
        if self._open:
            self._open = False
            self._loop_call.wake()  # another task may be reading
            self._engine.abort(self._call)
