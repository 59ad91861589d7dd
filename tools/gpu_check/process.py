"""Sessions in child processes: with time limits, several at once, and again for what is left after a failure."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from minisgl_core.registry import DeviceFacts

from .checks import Check, Record, Status
from .worker import MAX_LINES, Order

__all__ = ["OUT_OF_TIME", "Settings", "in_turn", "run_checks", "sessions_of"]

START_LIMIT_S: Final = 180.0
"""Until a child has imported what it needs and listed the checks."""
END_LIMIT_S: Final = 10.0
"""Until the threads have noticed that their children are gone."""
MOMENT_S: Final = 10.0
"""A session that costs no more delays nobody."""
OUT_OF_TIME: Final = "the time budget of the whole run ended"
PROGRAM: Final = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Settings:
    """How checks are run. ``deadline``: of the whole run, on ``time.monotonic``; None = none."""

    device: DeviceFacts
    quick: bool
    scratch: Path
    jobs: int = 1
    deadline: float | None = None
    catalogue: str = "gpu_check.catalogue:checks"
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()


def sessions_of(checks: Iterable[Check]) -> dict[str, list[Check]]:
    """Checks by session, in their order."""
    sessions: dict[str, list[Check]] = {}
    for check in checks:
        sessions.setdefault(check.process, []).append(check)
    return sessions


def in_turn(sessions: Iterable[list[Check]], jobs: int) -> tuple[deque[list[Check]], deque[list[Check]]]:
    """Those to run by themselves, and the others: the longest first, so that none is what all wait for in the end.

    Before them, as they are listed, those of a moment: a short budget must not end before they begin.
    """

    def turn(session: list[Check]) -> float:
        cost = sum(check.seconds for check in session)
        return -math.inf if cost <= MOMENT_S else -cost

    by_itself, together = deque[list[Check]](), deque[list[Check]]()
    for session in sessions:
        (by_itself if any(check.alone for check in session) else together).append(session)
    if jobs > 1:
        together = deque(sorted(together, key=turn))
    return by_itself, together


def run_checks(
    checks: Iterable[Check],
    settings: Settings,
    finished: Callable[[Record], None],
    started: Callable[[str], None] | None = None,
) -> None:
    """Run all checks: those that must be alone one after the other, then ``settings.jobs`` sessions at once.
    ``finished`` hears of each, from one thread at a time.

    What was not run when the deadline came is told as ``unfinished``.
    """
    by_itself, together = in_turn(sessions_of(checks).values(), settings.jobs)
    lock = threading.Lock()
    children = _Children()

    def tell(record: Record) -> None:
        with lock:
            if not children.closed:  # else it was killed: it has not failed, the run was ended
                finished(record)

    def work(waiting: deque[list[Check]]) -> None:
        with contextlib.suppress(IndexError):
            while True:
                _run_session(waiting.popleft(), settings, children, tell, started or (lambda name: None))

    for waiting, jobs in ((by_itself, 1), (together, max(1, settings.jobs))):
        threads = [threading.Thread(target=work, args=(waiting,), daemon=True) for _ in range(jobs)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        except BaseException:
            waiting.clear()
            children.kill()
            for thread in threads:
                thread.join(END_LIMIT_S)
            raise


class _Children:
    """The running child processes, to be ended if the parent is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pids: set[int] = set()
        self.closed = False
        """The run is being ended."""

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        with self._lock:
            if self.closed:
                raise RuntimeError("the run is being ended")
            process = subprocess.Popen(command, start_new_session=True, **options)
            self._pids.add(process.pid)
            return process

    def end(self, process: subprocess.Popen[bytes]) -> int:
        """Kill it with everything it started, unless it has ended; returns its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()

    def forget(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._pids.discard(process.pid)

    def kill(self) -> None:
        with self._lock:
            self.closed = True
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)


def _run_session(
    checks: list[Check],
    settings: Settings,
    children: _Children,
    finished: Callable[[Record], None],
    started: Callable[[str], None],
) -> None:
    left = list(checks)
    while left and settings.left > 0 and not children.closed:
        done = _Attempt(left, settings, children, finished, started).run()
        left = left[done:]
    for check in left:
        finished(Record(check.name, "unfinished", error=(OUT_OF_TIME,), cases=check.cases))


class _Attempt:
    """One child for the rest of a session. It reports every check that it began."""

    def __init__(
        self,
        checks: list[Check],
        settings: Settings,
        children: _Children,
        finished: Callable[[Record], None],
        started: Callable[[str], None],
    ) -> None:
        self._checks, self._settings, self._children = checks, settings, children
        self._finished, self._started = finished, started
        self._done = 0
        self._running = False
        self._began = time.monotonic()
        self._limit = START_LIMIT_S
        self._figures: dict[str, Any] = {}

    def run(self) -> int:
        """How many checks are done with, at least one; all if the run is being ended."""
        settings, first = self._settings, self._checks[0]
        logs = settings.scratch / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{first.process.replace('/', '_').replace(':', '_')}.txt"
        read, write = os.pipe()
        names = [check.name for check in self._checks]
        order = Order(asdict(settings.device), settings.quick, str(settings.scratch), settings.catalogue, names, write)
        with log.open("ab") as out, os.fdopen(read, "rb", buffering=0) as pipe:
            try:
                process = self._children.start(
                    [sys.executable, str(PROGRAM), "--worker", json.dumps(asdict(order))],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    pass_fds=(write,),
                    env={**os.environ, **settings.env, **first.env, "PYTHONFAULTHANDLER": "1"},
                )
            finally:
                os.close(write)
            problem = self._listen(pipe.fileno())
            code = self._children.end(process) if problem else process.wait()
            self._children.forget(process)
        if self._children.closed:  # ended with the run: nobody asks why, and the logs may be gone already
            return len(self._checks)
        if self._done == 0 or self._running:
            self._report_loss(problem or _died(code), log)
        elif code and not problem:
            error = (_died(code) + " after its checks", *_tail(log))
            self._finished(Record(f"{first.process} (at exit)", "failed", error=error))
        return self._done

    def _listen(self, fd: int) -> str:
        """Until the child is silent for ever (empty) or has to be ended (why)."""
        for line in _lines(fd, self._seconds_left):
            if line is None:
                late = self._settings.left <= 0
                return OUT_OF_TIME if late else f"it did not end within {self._limit:.0f} s"
            self._hear(json.loads(line))
        return ""

    def _seconds_left(self) -> float:
        return min(self._began + self._limit - time.monotonic(), self._settings.left)

    def _hear(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "start":
            self._running, self._figures = True, {}
            self._began, self._limit = time.monotonic(), event["limit"]
            self._started(event["name"])
        elif event["event"] == "note":
            self._figures.update(event["figures"])
        else:
            self._running = False
            self._began, self._limit = time.monotonic(), START_LIMIT_S
            self._done += 1
            self._finished(Record.from_json(event["record"]))

    def _report_loss(self, problem: str, log: Path) -> None:
        check = self._checks[self._done]
        self._done += 1
        status: Status = "unfinished" if problem == OUT_OF_TIME else "failed"
        where = "" if self._running else " (before the check began)"
        error = (problem + where, *(_tail(log) if status == "failed" else ()))
        seconds = time.monotonic() - self._began
        self._finished(Record(check.name, status, seconds, self._figures, error, check.cases))


def _tail(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-MAX_LINES + 1 :]


def _died(code: int) -> str:
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def _lines(fd: int, seconds_left: Callable[[], float]) -> Iterator[bytes | None]:
    """Lines as they come; None when the time is over. Ends at the end of the file."""
    held = b""
    while True:
        wait = seconds_left()
        if wait <= 0:
            yield None
            return
        # in slices: the limit may have been moved meanwhile, and an infinite wait is no argument of select
        if not select.select([fd], [], [], min(wait, 1.0))[0]:
            continue
        data = os.read(fd, 1 << 16)
        if not data:
            return
        *whole, held = (held + data).split(b"\n")
        yield from whole
