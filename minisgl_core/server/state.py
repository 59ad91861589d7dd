"""What the routes share: the model, once it is loaded, and the requests that run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minisgl_core.errors import MinisglError

from .errors import APIError
from .parsing import Parsers

if TYPE_CHECKING:
    from minisgl_core.llm import AsyncLLM

__all__ = ["STALLED_S", "ServerOptions", "ServerState"]

RETRY_AFTER_S = 1
STALLED_S = 60.0
ANSWER_S = 1.0
"""An engine that is not in a long step answers within this."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to serve."""

    model_name: str
    """What clients call the model."""
    api_key: str = ""
    """Clients must send it; empty: none."""
    max_waiting: int = 1024
    """Requests that may wait for a place in a batch; more are answered with status 429."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may call the server; ``*`` = of all."""
    request_timeout_s: float = 0.0
    """A request that takes longer is ended; 0: none is."""
    hung_step_s: float = 60.0
    """The engine is not healthy once one of its steps has lasted as long."""
    stalled_s: float = STALLED_S
    """A client that reads nothing of its stream for as long is given up."""
    page: bool = True
    """Serve the page at ``/``."""


@dataclass(slots=True)
class ServerState:
    """One server's. All of it is read and changed in the event loop."""

    options: ServerOptions
    llm: AsyncLLM | None = None
    """None while it is loaded."""
    draining: bool = False
    """No request is accepted any more; those that run are answered."""
    created: int = field(default_factory=lambda: int(time.time()))
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By the request's id."""
    parsers: Parsers | None = None
    """Of the model; made for the first chat."""
    admitted: int = 0
    """Sequences that wait or run."""

    @property
    def status(self) -> str:
        """``loading``, ``ready`` or ``draining``."""
        return "draining" if self.draining else "loading" if self.llm is None else "ready"

    def need_model(self) -> AsyncLLM:
        """The model. Raises :class:`APIError` with status 503 while there is none to ask."""
        if self.draining:
            raise APIError(503, "the server is shutting down", headers={"retry-after": str(RETRY_AFTER_S)})
        if self.llm is None:
            raise APIError(503, "the model is being loaded", headers={"retry-after": str(RETRY_AFTER_S)})
        return self.llm

    def parsers_of(self, llm: AsyncLLM) -> Parsers:
        """The parsers of the model's answers. Raises what their plugins raise."""
        if self.parsers is None:
            self.parsers = Parsers(llm)
        return self.parsers

    def check_name(self, name: str | None) -> None:
        """Raise :class:`APIError` if a client names another model; naming none is fine."""
        if name is not None and name != self.options.model_name:
            raise APIError(
                404,
                f"the model {name!r} is not served here; this server has {self.options.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def check_health(self) -> None:
        """Raise :class:`APIError` with status 503 unless the engine answers, or has been in its step for a short time
        only.
        """
        if self.llm is None:
            raise APIError(503, "the model is being loaded")
        try:
            await asyncio.wait_for(self.llm.ping(), ANSWER_S)
        except MinisglError as error:
            raise APIError(503, error.headline) from error
        except TimeoutError:
            if (hanging := self.llm.hanging(self.options.hung_step_s)) is not None:
                raise APIError(503, hanging.partition("\n")[0], code="hung_step") from None

    def check_room(self, sequences: int) -> None:
        """Raise :class:`APIError` with status 429 if there is no place for this many sequences more."""
        most = self.need_model().engine_config.max_running_req + self.options.max_waiting
        if self.admitted + sequences > most:
            raise APIError(
                429,
                f"{self.admitted} requests run and wait, and {most} may",
                code="too_many_requests",
                headers={"retry-after": str(RETRY_AFTER_S)},
            )

    @contextmanager
    def admit(self, request_id: str, sequences: int) -> Iterator[None]:
        """For as long as a request waits or runs. Raises :class:`APIError` with status 429 if too many wait."""
        self.check_room(sequences)
        if request_id in self.running:
            raise APIError(400, f"a request with the id {request_id!r} is running", param="x-request-id")
        task = asyncio.current_task()
        assert task is not None
        self.admitted += sequences
        self.running[request_id] = task
        try:
            yield
        finally:
            self.admitted -= sequences
            del self.running[request_id]
