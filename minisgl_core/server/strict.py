"""JSON as RFC 8259 has it: what readers understand differently is refused, not guessed."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, Never

from fastapi import Request, Response
from fastapi.routing import APIRoute

from .errors import APIError

__all__ = ["StrictRoute"]


class _StrictRequest(Request):
    async def json(self) -> Any:
        """The body. Raises :class:`APIError` for NaN and infinities, for names that an object has twice, and for text
        that UTF-8 cannot write.
        """
        if not hasattr(self, "_json"):
            body = await self.body()
            value = json.loads(body, parse_constant=_refuse_constant, object_pairs_hook=_object)
            if b"\\u" in body:  # halves of surrogate pairs can only come from escapes
                _check_text(value)
            self._json = value
        return self._json


class StrictRoute(APIRoute):
    """A route whose body is strict JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict


def _refuse_constant(name: str) -> Never:
    raise APIError(400, f"the body is not JSON: {name} is no number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise APIError(400, f"the body has {twice!r:.60} twice in one object")
    return made


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise APIError(400, "the body has half of a surrogate pair, which no text can contain") from None
