"""Answers of a server that speaks OpenAI's API, over the standard library's HTTP client."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click

from minisgl_core import __version__
from minisgl_core.errors import EngineError, UsageError

from .conversation import Part

if TYPE_CHECKING:
    from collections.abc import Generator
    from urllib.parse import SplitResult

__all__ = ["ChatServer"]

CONNECT_S: Final = 30.0
"""To reach the server and to learn the names of its models; an answer may take any time."""
MOST_TEXT: Final = 500
"""Characters of a message of the server that are shown"""
_CLASSES: Final = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class _Refused(Exception):
    """What the server says about a request, in one line."""


class ChatServer:
    """One model of a server. Raises :class:`UsageError` or :class:`EngineError` if there is none to ask."""

    def __init__(self, url: str, key: str | None, model: str | None, sampling: Mapping[str, Any]) -> None:
        self._url = url if "://" in url else f"http://{url}"
        parts = urlsplit(self._url)
        if parts.scheme not in _CLASSES or not parts.hostname or not _has_port(parts):
            raise UsageError(f"--url is {url!r}", field="--url", value=url, remedy="give such as http://127.0.0.1:8000")
        self._connect, self._netloc = _CLASSES[parts.scheme], parts.netloc.rpartition("@")[2]
        base = parts.path.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._headers = {"content-type": "application/json", "user-agent": f"minisgl/{__version__}"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._max_tokens = sampling.get("max_tokens")
        given = {name: value for name, value in sampling.items() if value is not None and value != ()}
        self._options = {name: value for name, value in given.items() if value is not False}  # a flag; 0 is a value
        self._model = self._choose(model)

    def stream(self, messages: list[dict[str, str]]) -> Generator[Part]:
        body = {"model": self._model, "messages": messages, "stream": True, **self._options}
        try:
            with self._request("POST", "/chat/completions", body) as response:
                yield from _parts(response)
        except _Refused as error:
            yield Part("", error=str(error))
        except (OSError, http.client.HTTPException) as error:
            yield Part("", error=f"{self._url} does not answer: {_why(error)}")

    def limit(self, tokens: int) -> str:
        return "the server's limit" if self._max_tokens is None else "--max-tokens, or the context is full"

    def _choose(self, model: str | None) -> str:
        names = self._models()
        if model is None and names:
            return names[0]
        if model is None or model not in names:
            has = f"it has {', '.join(names)}" if names else "it names none"
            raise UsageError(
                f"{self._url} has no model {model or ''}".rstrip(), field="--model", value=model, remedy=has
            )
        return model

    def _models(self) -> list[str]:
        try:
            with self._request("GET", "/models") as response:
                return [str(one["id"]) for one in json.loads(response.read())["data"]]
        except _Refused as error:
            raise EngineError(f"{self._url} refuses: {error}", field="--url", value=self._url) from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(
                f"{self._url} does not answer: {_why(error)}",
                field="--url",
                value=self._url,
                remedy="`minisgl serve` prints the URL of a server",
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise EngineError(
                f"{self._url}{self._base}/models is no list of models; is this a server of OpenAI's API?",
                field="--url",
                value=self._url,
            ) from error

    @contextmanager
    def _request(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        """Raises :class:`_Refused` for a status other than 200."""
        connection = self._connect(self._netloc, timeout=CONNECT_S)
        try:
            connection.connect()
            if body is not None:
                connection.sock.settimeout(None)
            content = None if body is None else json.dumps(body)
            connection.request(method, self._base + path, content, self._headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise _Refused(_message(response))
            yield response
        finally:
            connection.close()


def _has_port(parts: SplitResult) -> bool:
    """Whether the port, if one is named, is one."""
    try:
        return parts.port != 0
    except ValueError:
        return False


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _message(response: http.client.HTTPResponse) -> str:
    """What the server says is wrong: OpenAI's shape, that of FastAPI, or the beginning of the text."""
    text = response.read(1 << 16).decode(errors="replace")
    try:
        body = json.loads(text)
        error = body.get("error", body.get("detail", body.get("message")))
        text = str(error.get("message") if isinstance(error, dict) else error or text)
    except (ValueError, AttributeError):
        pass
    line = " ".join(text.split())
    return f"{line[:MOST_TEXT] or response.reason} (status {response.status})"


def _parts(response: http.client.HTTPResponse) -> Generator[Part]:
    """Each event of an answer; reasoning that the server separates goes to standard error."""
    for line in response:
        field, _, data = line.decode(errors="replace").strip().partition(":")
        if field != "data":
            continue
        if data.strip() == "[DONE]":
            return
        event = _event(data)
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                click.echo(thought, nl=False, err=True)
            yield Part(delta.get("content") or "", finish_reason=choice.get("finish_reason"))
    raise http.client.HTTPException("the connection ended before the answer did")


def _event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise http.client.HTTPException(f"this is no event of OpenAI's API: {data.strip()[:80]}")
    if (error := event.get("error")) is not None:
        raise _Refused(" ".join(str(error.get("message") if isinstance(error, dict) else error).split())[:MOST_TEXT])
    return event
