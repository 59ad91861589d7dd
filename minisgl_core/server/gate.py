"""What happens to every HTTP request: its id, the key, the size of its body, a line in the access log."""

from __future__ import annotations

import json
import logging
import secrets
import time
import uuid
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

from .errors import APIError, error_body
from .view import PAGE_PATHS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .metrics import Metrics
    from .state import ServerState

__all__ = ["Gate"]

access_log = logging.getLogger("minisgl.access")
OPEN_PATHS: Final = frozenset(("/health", "/ready", "/metrics", *PAGE_PATHS))
"""What load balancers, monitors and browsers ask, without a key"""
UNLOGGED: Final = "/stats"
"""The page asks once a second."""
LONGEST_ID: Final = 128
MIN_BODY: Final = 1 << 20
BYTES_PER_TOKEN: Final = 64
"""More than any prompt has on average: a longer body cannot be served, and is not worth parsing."""


class Gate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, state: ServerState, metrics: Metrics) -> None:
        self._app, self._state, self._metrics = app, state, metrics
        self._key = f"Bearer {state.options.api_key}".encode() if state.options.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id") or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.perf_counter(), 499  # as long as nothing has been sent: the client went away

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check(scope["path"], headers)
            await self._app(scope, self._limited(receive), answer)
        except APIError as error:
            await JSONResponse(error_body(error), error.status_code, headers=error.headers)(scope, receive, answer)
        finally:
            self._metrics.http[_route(scope), status] += 1
            if scope["path"] != UNLOGGED or status >= 400:
                _log(scope, request_id, status, time.perf_counter() - began)

    def _check(self, path: str, headers: Headers) -> None:
        if len(headers.get("x-request-id", "")) > LONGEST_ID:
            raise APIError(400, f"the id of a request has at most {LONGEST_ID} characters", param="x-request-id")
        if self._key is not None and path not in OPEN_PATHS:
            given = headers.get("authorization", "").encode()
            if not secrets.compare_digest(given, self._key):
                raise APIError(
                    401,
                    "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
        length = headers.get("content-length", "")
        self._check_size(int(length) if length.isdecimal() else 0)

    def _check_size(self, size: int) -> None:
        llm = self._state.llm
        longest = MIN_BODY if llm is None else max(MIN_BODY, BYTES_PER_TOKEN * llm.max_seq_len)
        if size > longest:
            raise APIError(413, f"the body is larger than {longest} bytes, more than any prompt of this model has")

    def _limited(self, receive: Receive) -> Receive:
        """A body that is sent in chunks does not say its length first."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                self._check_size(size)
            return message

        return counted


def _route(scope: Scope) -> str:
    """Few different texts, however many paths clients try."""
    return getattr(scope.get("route"), "path", "") or "other"


def _log(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    line = {
        "request_id": request_id,
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 4),
        "client": (scope.get("client") or ("",))[0],
        **scope["state"].get("log", {}),
    }
    access_log.info("%s", json.dumps(line))
