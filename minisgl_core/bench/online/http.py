"""A light HTTP/1.1 connection that reports the body of an answer as it arrives.

The client must not be what is measured: one call of Python per received segment, and no copy of a body.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from minisgl_core.errors import UsageError

__all__ = ["Connection", "Endpoint", "Pool", "parse_url"]

IDLE_S: Final = 2.0
"""An unused connection is kept for this long; servers close theirs after a few seconds."""
_HEAD_END: Final = b"\r\n\r\n"

OnBody = Callable[[bytes, float], None]
"""Receives a part of the body and the time at which it arrived."""


class Endpoint(NamedTuple):
    """Where a server listens."""

    host: str
    port: int
    tls: bool
    prefix: str
    """What precedes ``/v1`` in paths"""
    api_key: str = ""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * self.tls}://{host}:{self.port}{self.prefix}"

    def post(self, path: str, body: bytes) -> bytes:
        """A request as bytes."""
        key = f"authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"POST {self.prefix}{path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\n{key}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def parse_url(url: str, api_key: str = "") -> Endpoint:
    """The server of ``http://HOST:PORT``, with or without ``/v1`` at the end. Raises :class:`UsageError`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        remedy = "give the address of a server, such as http://127.0.0.1:8000"
        raise UsageError(f"--url is {url!r}", field="--url", value=url, remedy=remedy)
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Endpoint(parts.hostname, port or (443 if tls else 80), tls, prefix, api_key)


class Connection(asyncio.Protocol):
    """One connection, which serves one request at a time."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[int] | None = None
        self._on_body: OnBody | None = None
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self._left: int | None = 0
        """Bytes until the end of a chunk or of the body; None = until the connection is closed."""
        self._chunked = False
        self._keep = True

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing() and self._keep

    async def request(self, request: bytes, on_body: OnBody) -> int:
        """Send a request and read its answer. Returns the status. Raises :class:`ConnectionError`."""
        assert self._transport is not None and self._done is None
        self._reset()
        self._on_body = on_body
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._done = None

    def close(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Undo the framing."""
        now = time.perf_counter()
        self._buffer += data
        try:
            if self.status or self._read_head():
                self._read_body(now)
        except ValueError:
            self._fail("the answer is not valid HTTP")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """End the answer: this is its regular end if it has no length."""
        self._keep = False
        if self.status and self._left is None and error is None:
            self._finish()
        else:
            self._fail("the connection was closed before the answer was complete")

    # ---- framing ---------------------------------------------------------------------------------------------------

    def _read_head(self) -> bool:
        end = self._buffer.find(_HEAD_END)
        if end < 0:
            return False
        first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + len(_HEAD_END)]
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in (i.partition(":") for i in lines)}
        self.status = int(first.split(" ", 2)[1]) if first.count(" ") else int("")
        self._keep = headers.get("connection") != "close"
        self._chunked = headers.get("transfer-encoding") == "chunked"
        length = headers.get("content-length")
        self._left = 0 if self._chunked else None if length is None else int(length)
        return True

    def _read_body(self, now: float) -> None:
        if self._chunked:
            self._read_chunks(now)
            return
        size = len(self._buffer) if self._left is None else min(self._left, len(self._buffer))
        self._pass_on(size, now)
        if self._left is not None:
            self._left -= size
            if self._left == 0:
                self._finish()

    def _read_chunks(self, now: float) -> None:
        while self._done is not None and not self._done.done():
            assert self._left is not None
            if self._left > 2:  # the last two bytes are the line break that follows a chunk
                size = min(self._left - 2, len(self._buffer))
                self._pass_on(size, now)
                self._left -= size
            if self._left > 2 or len(self._buffer) < self._left:
                return
            del self._buffer[: self._left]
            self._left = 0
            end = self._buffer.find(b"\r\n")
            if end < 0:
                return
            size = int(self._buffer[:end].partition(b";")[0], 16)
            if size:
                del self._buffer[: end + 2]
                self._left = size + 2
            elif self._buffer.find(_HEAD_END) >= 0:  # trailers, if any, end with an empty line
                del self._buffer[: self._buffer.find(_HEAD_END) + len(_HEAD_END)]
                self._finish()
            else:
                return

    def _pass_on(self, size: int, now: float) -> None:
        if size and self._on_body is not None:
            self._on_body(bytes(self._buffer[:size]), now)
            del self._buffer[:size]

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self.status)

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(why))


class Pool:
    """The connections to one server; a request takes one that is idle, or opens one."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if endpoint.tls else None

    async def request(self, request: bytes, on_body: OnBody) -> int:
        """Send a request and read its answer. Returns the status. Raises :class:`OSError`."""
        connection = self._take() or await self._connect()
        status = await connection.request(request, on_body)
        if connection.usable:
            connection.idle_since = time.perf_counter()
            self._idle.append(connection)
        else:
            connection.close()
        return status

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take(self) -> Connection | None:
        oldest = time.perf_counter() - IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        host, port = self.endpoint.host, self.endpoint.port
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, host, port, ssl=self._tls)
        return connection
