"""Sessions in child processes: with time limits, several at once, and again for the rest after a failure."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from .check import ROOT, Check, Context, Record, Status
from .child import MAX_LINES, SessionRequest
from .collect import FOLDER, sessions_of

__all__ = ["OUT_OF_TIME", "Settings", "in_turn", "run_checks"]

START_LIMIT_S: Final = 180.0
"""Until a child has imported its modules and collected its tests"""
SHORT_S: Final = 10.0
"""Sessions up to this cost run first."""
POLL_S: Final = 0.05
OUT_OF_TIME: Final = "the time budget of the whole run ended"


@dataclass(frozen=True)
class Settings:
    """How checks are run. ``deadline``: of the whole run, on ``time.monotonic``; None = none."""

    context: Context
    jobs: int = 1
    deadline: float | None = None
    folder: Path = FOLDER
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return math.inf if self.deadline is None else self.deadline - time.monotonic()


def in_turn(sessions: Iterable[list[Check]], jobs: int) -> tuple[deque[list[Check]], deque[list[Check]]]:
    """The sessions to run alone, and the others. Of these the short ones come first, in their order, so that a small
    budget does not end before them; then the longest, so that none is left over at the end.
    """

    def turn(session: list[Check]) -> float:
        cost = sum(check.seconds for check in session)
        return -math.inf if cost <= SHORT_S else -cost

    alone, together = deque[list[Check]](), deque[list[Check]]()
    for session in sessions:
        (alone if any(check.alone for check in session) else together).append(session)
    return alone, deque(sorted(together, key=turn)) if jobs > 1 else together


def run_checks(checks: Iterable[Check], settings: Settings, finished: Callable[[Record], None]) -> None:
    """Run all checks: sessions that must be alone one after the other, then ``settings.jobs`` sessions at once.

    ``finished`` is called with each record. Checks that the deadline prevents are ``unfinished``.
    """
    alone, together = in_turn(sessions_of(checks).values(), settings.jobs)
    for waiting, jobs in ((alone, 1), (together, settings.jobs)):
        running: list[_Session] = []
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_Session(waiting.popleft(), settings, finished))
                running = [session for session in running if session.goes_on()]
                time.sleep(POLL_S)
        finally:
            for session in running:
                session.kill()


class _Session:
    """Checks that share a process, until it fails: then another one runs the rest."""

    def __init__(self, checks: list[Check], settings: Settings, finished: Callable[[Record], None]) -> None:
        self._checks, self._settings, self._finished = list(checks), settings, finished
        self._name = checks[0].process
        self._process: subprocess.Popen[bytes] | None = None

    def goes_on(self) -> bool:
        """Follow the child; False once every check has its record."""
        if self._process is None:
            if self._settings.left <= 0:
                for check in self._checks:
                    self._finished(Record(check.name, "unfinished", error=(OUT_OF_TIME,), cases=check.cases))
                return False
            self._start()
        elif (code := self._process.poll()) is not None:
            self._read_events()
            self._ended(code)
        else:
            self._read_events()
            if self._settings.left <= 0:
                self._end_early(OUT_OF_TIME)
            elif time.monotonic() > self._began + self._limit:
                self._end_early(f"it did not end within {self._limit:.0f} s")
        return bool(self._checks) or self._process is not None

    def kill(self) -> None:
        """End the child with everything it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        context, first = self._settings.context, self._checks[0]
        logs = context.scratch / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        file = self._name.replace("/", "_").replace(":", "_")
        self._log, self._events = logs / f"{file}.txt", logs / f"{file}.events"
        self._events.write_bytes(b"")
        self._read = 0
        self._began, self._limit = time.monotonic(), START_LIMIT_S
        self._any = self._running = self._failed = False
        self._figures: dict[str, Any] = {}
        nodeids, folder = [check.nodeid for check in self._checks], str(self._settings.folder)
        device, scratch, events = asdict(context.device), str(context.scratch), str(self._events)
        request = SessionRequest(device, context.quick, scratch, folder, nodeids, events)
        path = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
        own = {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                # -P: the checkout's root would hide the installed distributions
                [sys.executable, "-P", "-m", "support.gpu", "--child", json.dumps(asdict(request))],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env={**os.environ, **own, **self._settings.env, **first.env},
                start_new_session=True,
            )

    def _read_events(self) -> None:
        with self._events.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + bool(whole)
        for line in whole.splitlines():
            self._hear(json.loads(line))

    def _hear(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "note":
            self._figures.update(event["figures"])
            return
        self._any, self._running = True, event["event"] == "start"
        self._began = time.monotonic()
        if self._running:
            self._figures, self._limit = {}, event["limit"]
        else:
            self._limit = START_LIMIT_S
            del self._checks[0]
            record = Record.from_json(event["record"])
            self._failed = record.status == "failed"
            self._finished(record)

    def _ended(self, code: int) -> None:
        """The child has ended by itself."""
        self._process = None
        expected = (0, pytest.ExitCode.INTERRUPTED) if self._failed else (0,)
        if self._running or not self._any:
            self._lose(_died(code))
        elif code not in expected:
            error = (_died(code) + " after its checks", *self._tail())
            self._finished(Record(f"{self._name} (at exit)", "failed", error=error))

    def _end_early(self, problem: str) -> None:
        self.kill()
        self._read_events()
        if self._running or not self._any:
            self._lose(problem)

    def _lose(self, problem: str) -> None:
        """The record of a check that ended its process, or was ended with it."""
        check = self._checks.pop(0)
        status: Status = "unfinished" if problem == OUT_OF_TIME else "failed"
        where = "" if self._running else " (before the check began)"
        error = (problem + where, *(self._tail() if status == "failed" else ()))
        seconds = time.monotonic() - self._began
        self._finished(Record(check.name, status, seconds, self._figures, error, check.cases))

    def _tail(self) -> list[str]:
        """The last lines of the output; after a crash the innermost calls, which the fault handler prints first."""
        lines = self._log.read_text(errors="replace").splitlines()
        crashes = [index for index, line in enumerate(lines) if line.startswith("Fatal Python error")]
        return lines[crashes[-1] :][: MAX_LINES - 1] if crashes else lines[-MAX_LINES + 1 :]


def _died(code: int) -> str:
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"
