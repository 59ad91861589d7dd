"""Errors in OpenAI's JSON shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from minisgl_core.errors import AdmissionError, MinisglError, UsageError, nearest

from .schema import NEUTRAL, UNSUPPORTED, ChatBody, CompletionBody

__all__ = ["APIError", "add_handlers", "error_body", "from_engine", "timed_out"]

_TYPES: Final = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_WANTED: Final = {
    "prompt": "give a text, a list of token ids, or a list of these",
    "stop": "give a text or a list of texts",
    "messages": 'give a list of objects such as {"role": "user", "content": "Hello"}',
}
"""Where pydantic would list what each member of a union has against a value."""


class APIError(HTTPException):
    """An answer with that HTTP status. ``param``: the field of the body at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code


def error_body(error: APIError) -> dict[str, Any]:
    """As JSON data."""
    kind = _TYPES.get(error.status_code, "invalid_request_error")
    return {"error": {"message": error.detail, "type": kind, "param": error.param, "code": error.code}}


def timed_out() -> APIError:
    """The error of a request whose time is up. Without the header OpenAI's clients send it again at once."""
    headers = {"x-should-retry": "false"}
    return APIError(408, "the time for this request is up", code="request_timeout", headers=headers)


def from_engine(error: BaseException) -> APIError:
    """What a client sees of an error of the engine: a bad request is the client's, the rest the server's."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, AdmissionError):
        too_long = error.field == "prompt" and "context is" in error.message
        code = "context_length_exceeded" if too_long else None
        return APIError(400, error.headline, param=error.field or None, code=code)
    if isinstance(error, UsageError):  # the engine has been closed
        return APIError(503, error.headline)
    message = error.headline if isinstance(error, MinisglError) else f"{type(error).__name__}: {error}"
    return APIError(500, message)


def add_handlers(app: FastAPI) -> None:
    """Answer every error in that shape."""
    app.add_exception_handler(APIError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(MinisglError, _engine_error)
    app.add_exception_handler(Exception, _engine_error)  # a fault of our own, which is logged as well


def _answer(error: APIError) -> JSONResponse:
    return JSONResponse(error_body(error), error.status_code, headers=error.headers)


async def _api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, APIError)
    return _answer(error)


async def _engine_error(_: Request, error: Exception) -> JSONResponse:
    return _answer(from_engine(error))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code in (404, 405):
        message = f"{request.method} {request.url.path} is not served here; /openapi.json lists what is"
    return _answer(APIError(error.status_code, message, headers=dict(error.headers or {})))


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    """The first thing that is wrong with a body, by its name."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    # A union lists what each of its members has against the value, under the member's name.
    name = place[0] if place else ""
    if first["type"] == "extra_forbidden":
        return _answer(_unknown_field(place[-1]))
    if first["type"] == "json_invalid":
        return _answer(APIError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}"))
    if first["type"] == "value_error":
        return _answer(APIError(400, str(first["ctx"]["error"])))
    if first["type"] == "missing":
        return _answer(APIError(400, f"`{name}` is missing" if name else "the body is empty", param=name or None))
    if not name:
        return _answer(APIError(400, "the body is no JSON object; set the header content-type: application/json"))
    problem = _WANTED.get(name) or first["msg"].lower()
    return _answer(APIError(400, f"`{name}`: {problem}", param=name))


def _unknown_field(name: str) -> APIError:
    if name in UNSUPPORTED:
        return APIError(400, f"`{name}` is not supported; {UNSUPPORTED[name]}", param=name, code="unsupported")
    if name in NEUTRAL:
        served = " or ".join(json.dumps(value) for value in NEUTRAL[name])
        return APIError(400, f"`{name}` can only be {served} here; leave it out", param=name, code="unsupported")
    hint = nearest(name, {*ChatBody.model_fields, *CompletionBody.model_fields})
    return APIError(400, f"unknown field `{name}`{f'; {hint}' if hint else ''}", param=name)
