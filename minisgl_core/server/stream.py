"""Server-sent events, and work that ends when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.responses import Response

from .errors import APIError, error_body, from_engine, timed_out

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

__all__ = ["ClientGone", "EventStream", "merge", "unless_gone"]

T = TypeVar("T")
DONE: Final = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has closed its connection."""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """What ``work`` returns. It is cancelled, and :class:`ClientGone` raised, once the client goes away."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _cancel(task, gone)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Sends each object of ``events`` as an event, named by its ``type`` if it has one; else ``[DONE]`` ends them.

    A client that goes away, or reads nothing for ``stalled_s`` seconds, cancels the work behind the
    events; so does the ``deadline``, by the event loop's clock. The engine does not wait for a slow client: all that
    comes in the meantime is its next event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any]], stalled_s: float, deadline: float | None) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._stalled_s, self._deadline = events, stalled_s, deadline
        self._started = False
        self._done = DONE
        self._sending_since: float | None = None
        """Set while the client takes a part of the answer, by the event loop's clock."""
        self._stalled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        try:
            await unless_gone(self._send_all(send), receive)
        except (ClientGone, _Stalled):
            pass
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._started or (task is not None and task.cancelling()):
                raise
            # The request was aborted by its id, on another connection.
            await self._end(send, _event(error_body(APIError(499, "the request was aborted", code="aborted"))))

    async def _send_all(self, send: Send) -> None:
        sender = asyncio.current_task()
        assert sender is not None
        self._watch(sender)
        try:
            async with aclosing(self._events) as events:
                last = await self._send_events(send, events)
            await self._end(send, last)
        finally:
            self._timer.cancel()

    async def _send_events(self, send: Send, events: AsyncGenerator[dict[str, Any]]) -> bytes:
        """Returns the event of the error that ended them, if any."""
        try:
            async with asyncio.timeout_at(self._deadline):
                async for event in events:
                    if not self._started:
                        self._started = True
                        if "type" in event:
                            self._done = b""  # the last of named events says itself that it is
                        head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                        await send(head)
                    await self._send(send, _event(event))
        except _Stalled:
            raise
        except Exception as error:
            known = timed_out() if isinstance(error, TimeoutError) else from_engine(error)
            if not self._started:  # such as a full queue: it has a status of its own
                raise known from error
            return _event(error_body(known))
        return b""

    async def _end(self, send: Send, last: bytes = b"") -> None:
        await self._send(send, last + self._done)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        """Raises :class:`_Stalled`. One timer per stream looks at it now and then, instead of one per chunk."""
        self._sending_since = asyncio.get_running_loop().time()
        try:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        except asyncio.CancelledError:
            if not self._stalled:
                raise
            raise _Stalled from None
        self._sending_since = None

    def _watch(self, sender: asyncio.Task[None]) -> None:
        """Cancel a send that lasts."""
        loop, since = asyncio.get_running_loop(), self._sending_since
        now = loop.time()
        if sender.done():
            return
        if since is not None and now - since >= self._stalled_s:
            self._stalled = True
            sender.cancel()
            return
        self._timer = loop.call_at((now if since is None else since) + self._stalled_s, self._watch, sender)


class _Stalled(Exception):
    """The client does not read."""


def _event(data: dict[str, Any]) -> bytes:
    kind = data.get("type")
    name = b"" if kind is None else f"event: {kind}\n".encode()
    return name + b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


async def merge(streams: list[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """What several iterators bring, as it comes, each with the iterator's index."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield 0, item
        return
    waiting: dict[asyncio.Task[T], int] = {_next(stream): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[_next(streams[index])] = index
                yield index, item
    finally:
        await _cancel(*waiting)


def _next(stream: AsyncIterator[T]) -> asyncio.Task[T]:
    async def step() -> T:
        awaitable: Awaitable[T] = anext(stream)
        return await awaitable

    return asyncio.create_task(step())
