"""The child process: a pytest run over the checks of one session, which writes each event as a line of JSON."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from minisgl_core.registry import DeviceFacts

from .check import ROOT, Check, Context, Failed, Record, Skipped
from .collect import CONTEXT, pytest_arguments

__all__ = ["MAX_LINES", "SessionRequest", "serve"]

MAX_LINES: Final = 12
"""Of an error, in the report."""


@dataclass(frozen=True)
class SessionRequest:
    """What a child runs, and the file to which it appends events."""

    device: Mapping[str, Any]
    """Fields of DeviceFacts"""
    quick: bool
    scratch: str
    folder: str
    nodeids: Sequence[str]
    events: str


def serve(text: str) -> int:
    """Run a request (as JSON) to its end or to the first failure: the device may be in any state after that, so the
    parent starts another process for the rest.
    """
    request = SessionRequest(**json.loads(text))
    plugin = _Reporter(request)
    return int(pytest.main([*pytest_arguments(Path(request.folder)), *request.nodeids], plugins=[plugin]))


class _Reporter:
    """Reports the start, the figures and the record of each test."""

    def __init__(self, request: SessionRequest) -> None:
        self._events = Path(request.events)
        self._context = Context(DeviceFacts(**request.device), request.quick, Path(request.scratch), self._note)
        self._figures: dict[str, Any] = {}
        self._status: Any = "ok"
        self._error: Sequence[str] = ()

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[CONTEXT] = self._context

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        check, began = Check.of(item), time.perf_counter()
        self._figures, self._status, self._error = {}, "ok", ()
        self._send({"event": "start", "name": check.name, "limit": check.limit})
        answer = yield
        seconds = time.perf_counter() - began
        error: tuple[str, ...] = tuple(self._error[:MAX_LINES])
        record = Record(check.name, self._status, seconds, self._figures, error, check.cases)
        self._send({"event": "done", "record": record.to_json()})
        if self._status == "failed":
            item.session.shouldstop = "the device may be in any state"
        return answer

    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is None or self._status == "failed":
            return
        problem = call.excinfo.value
        self._status = "skipped" if isinstance(problem, Skipped) else "failed"
        if isinstance(problem, Skipped | Failed):
            self._error = str(problem).splitlines()
        else:
            traceback.print_exception(problem)  # the whole of it, to the session's log
            message = f"{type(problem).__name__}: {problem}".splitlines()
            self._error = [*message[: MAX_LINES - 4], *_places(problem)]

    def _note(self, **figures: Any) -> None:
        self._figures.update(figures)
        self._send({"event": "note", "figures": figures})

    def _send(self, event: Mapping[str, Any]) -> None:
        with self._events.open("a") as file:
            file.write(json.dumps(event, default=str) + "\n")


def _places(error: BaseException) -> list[str]:
    """The innermost calls, the last one last."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return [f"  in {_short(Path(frame.filename))}:{frame.lineno} {frame.name}" for frame in frames]


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "/".join(path.parts[-3:])
