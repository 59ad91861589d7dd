"""A server that follows a script instead of a model, for tests of clients."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FakeServer", "Script", "event", "fake_server"]

Part = float | bytes | None
"""Seconds to wait, bytes to send in a chunk of their own, or None: close the connection"""
Script = Callable[[dict[str, Any]], list[Part]]
"""From the body of a request to what is done; without ``status`` and headers it is a stream of events"""


def event(data: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


@dataclass
class FakeServer:
    """Answers ``POST /v1/completions`` and ``/v1/chat/completions`` as the script says."""

    script: Script
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of the requests for completions"""
    headers: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((line for line in head.lower().split("\r\n") if line.startswith("content-length:")), ":0")
                body = await reader.readexactly(int(length.partition(":")[2]))
                if not await self._answer(head, body, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def _answer(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        path = head.split(" ", 2)[1]
        if path.endswith("completions"):
            self.headers.append(head)
            self.bodies.append(json.loads(body))
            return await self._play(self.script(self.bodies[-1]), writer)
        known: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "fake"}]},
            "/health": {},
            "/detokenize": {"prompt": " ".join(map(str, json.loads(body or b"{}").get("tokens", [])))},
        }
        text = json.dumps(known.get(path, {})).encode()
        status = b"200 OK" if path in known else b"404 Not Found"
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(text), text))
        return True

    async def _play(self, parts: list[Part], writer: asyncio.StreamWriter) -> bool:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            whole = bool(parts) and isinstance(parts[0], bytes) and parts[0].startswith(b"HTTP/1.1 ")
            if not whole:
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for part in parts:
                if part is None:
                    return False
                if isinstance(part, bytes):
                    writer.write(part if whole else b"%x\r\n%s\r\n" % (len(part), part))
                    await writer.drain()
                else:
                    await asyncio.sleep(part)
            if not whole:
                writer.write(b"0\r\n\r\n")
            return True
        finally:
            self.in_flight -= 1


@contextmanager
def fake_server(script: Script) -> Iterator[FakeServer]:
    """The server in a thread, on a free port."""
    server, started, ended = FakeServer(script), threading.Event(), threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=1024)
        server.port = listening.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        listening.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    def work() -> None:
        loop.run_until_complete(run())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        ended.set()

    threading.Thread(target=work, daemon=True).start()
    assert started.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        assert ended.wait(60)
