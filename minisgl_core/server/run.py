"""The process of ``minisgl serve``: listens first, loads the model meanwhile, and drains at the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Final

import uvicorn

from minisgl_core.errors import UsageError

from .app import create_app
from .state import STALLED_S, ServerOptions, ServerState

if TYPE_CHECKING:
    from fastapi import FastAPI

    from minisgl_core.llm.llm import ProcessLLM

__all__ = ["bind", "raise_open_files", "serve"]

log = logging.getLogger("minisgl.server")
BACKLOG: Final = 2048
WATCH_S: Final = 1.0
"""Between two looks at the engine"""
DRAIN_S: Final = 120
"""Requests that run when the server is asked to end may take as long."""
FAILED_S: Final = 5.0
"""After a failure of the engine clients get as long to read why."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 = a free one. Raises :class:`UsageError` where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections have it too: the system closes one whose client is stalled
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * STALLED_S))
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}",
            field="server.port",
            value=port,
            remedy="give another --port, or --port 0 for a free one",
        ) from error
    return listener


def serve(listener: socket.socket, options: ServerOptions, load: Callable[[], ProcessLLM]) -> None:
    """Serve until SIGINT or SIGTERM, then answer what runs and return. A second SIGINT does not wait for that, and
    raises KeyboardInterrupt.

    ``load`` runs on a thread of its own; requests get status 503 until it returns. Raises what it raises, and what
    ends the engine later.
    """
    raise_open_files()
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    state = ServerState(options)
    loading = _Loading(load, state)
    app = create_app(state, loading.lifespan)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=DRAIN_S
    )
    server = _Server(config, state)
    loading.server = server
    server.run(sockets=[listener])
    if loading.failure is not None:
        raise loading.failure
    if server.force_exit:
        loading.kill()
        raise KeyboardInterrupt


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """What is cut off at the end is no error of the application's. Its traceback may be part of the message."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, asyncio.CancelledError) or record.getMessage().rstrip().endswith("CancelledError"))


def raise_open_files() -> None:
    """Each client takes a descriptor: allow this process as many as the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Server(uvicorn.Server):
    """Ends without raising the signal again: a server that was asked to end and has ended exits with 0."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While it serves. Signals come to the main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """No request is accepted from now on."""
        self._state.draining = True
        super().handle_exit(sig, frame)


class _Loading:
    """The model's start and end."""

    def __init__(self, load: Callable[[], ProcessLLM], state: ServerState) -> None:
        self._load, self._state = load, state
        self._llm: ProcessLLM | None = None
        self.server: _Server | None = None
        self.failure: BaseException | None = None

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """The application's."""
        loop = asyncio.get_running_loop()
        # A daemon, unlike a thread of the loop's pool: Ctrl-C need not wait until a large model is there.
        threading.Thread(target=self._run, args=(loop,), name="minisgl-load", daemon=True).start()
        watch = asyncio.create_task(self._watch())
        yield
        watch.cancel()
        if self._state.llm is not None:
            await asyncio.to_thread(self._state.llm.shutdown)

    def kill(self) -> None:
        """End the engine without waiting for its step."""
        if self._llm is not None:
            self._llm.kill()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server was ended while the model was loaded
            try:
                llm = self._load()
            except BaseException as error:
                loop.call_soon_threadsafe(self._fail, error)
            else:
                loop.call_soon_threadsafe(self._serve, llm)

    def _serve(self, llm: ProcessLLM) -> None:
        self._llm = self._state.llm = llm
        gc.collect()
        gc.freeze()  # what is there now stays: later collections need not look at it

    async def _watch(self) -> None:
        """A process that dies, or a step that fails, ends the server: no later request can be answered."""
        named = False
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                if self._llm is not None:
                    await asyncio.wait_for(self._llm.ping(), WATCH_S)
                named = False
            except TimeoutError:
                named = named or self._name_hung_step()
            except Exception as error:
                self._fail(error)
                return

    def _name_hung_step(self) -> bool:
        """Log a step that hangs; return whether one does."""
        assert self._llm is not None
        if (hanging := self._llm.hanging(self._state.options.hung_step_s)) is None:
            return False
        log.error("%s", hanging)
        return True

    def _fail(self, error: BaseException) -> None:
        self.failure, self._state.draining = error, True
        assert self.server is not None
        self.server.should_exit = True
        asyncio.get_running_loop().call_later(FAILED_S, setattr, self.server, "force_exit", True)
