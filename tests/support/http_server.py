"""A server of this process, on a free port."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import uvicorn
from openai import OpenAI

from minisgl_core.llm import AsyncLLM
from minisgl_core.server import create_app
from minisgl_core.server.run import bind
from minisgl_core.server.state import ServerOptions, ServerState

__all__ = ["Served", "serving"]


@dataclass
class Served:
    """A running server."""

    state: ServerState
    url: str
    port: int
    stop: Callable[[], None]
    """End it, whatever runs."""

    @property
    def llm(self) -> AsyncLLM:
        assert self.state.llm is not None
        return self.state.llm

    @cached_property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.state.options.api_key or "none", max_retries=0)

    def rests(self, within_s: float = 10.0) -> bool:
        """Whether nothing runs and no page is held, soon."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            stats = self.llm.scheduler.stats
            if not (stats.running or stats.waiting or self.state.running or self.state.admitted):
                self.llm.scheduler.check_integrity()
                return True
            time.sleep(0.02)
        return False

    def raw(self, request: bytes, *, read: int = 0) -> socket.socket:
        """A connection on which ``request`` has been sent and at least ``read`` bytes have been received."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(request)
        received = 0
        while received < read:
            received += len(connection.recv(4096))
        return connection


@contextmanager
def serving(llm: AsyncLLM | None, **options: Any) -> Iterator[Served]:
    listener = bind("127.0.0.1", 0)
    state = ServerState(ServerOptions("tiny", **options), llm)
    server = uvicorn.Server(uvicorn.Config(create_app(state), log_config=None, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    port = listener.getsockname()[1]

    def stop() -> None:
        server.should_exit = True
        thread.join(30)
        listener.close()

    served = Served(state, f"http://127.0.0.1:{port}", port, stop)
    try:
        yield served
    finally:
        served.client.close()
        stop()
