"""Runs many checks in one child process, and starts another after a crash, a hang or an exit."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, Final

from .child import SpeedRequest
from .run import Outcome
from .where import line_of

if TYPE_CHECKING:
    from minisgl_core.registry import DeviceFacts

    from .backend_under_test import BackendUnderTest
    from .check import Check
    from .speed import Speed

__all__ = ["CHECK_LIMIT_S", "CheckProcess", "run_isolated"]

CHECK_LIMIT_S: Final = 300.0
"""Time limit of one check, which may compile kernels."""
MOST_HANGS: Final = 2
"""Hangs after which the other checks are not run, because each would take the whole time limit."""
MOST_ENDS: Final = 8
"""Crashes and exits after which the other checks are not run."""
START_LIMIT_S: Final = 120.0
_SLICE_S: Final = 0.25
_PROGRAM: Final = "from minisgl_core.testing.child import main; main()"
_SHOWN: Final = 200
"""Characters of the output that are shown."""
_STACK: Final = re.compile(r"^Current thread .*(?:\n  File .*)+", re.MULTILINE)
_FRAME: Final = re.compile(r'  File "(.+)", line (\d+) in (\S+)')


class _Ended(Exception):
    """The child died, or was killed because it did not answer."""

    def __init__(self, text: str, *, hung: bool = False) -> None:
        super().__init__(text)
        self.hung = hung


class CheckProcess:
    """Runs checks on one backend. :attr:`hangs` and :attr:`ends` count how its children ended."""

    def __init__(self, under_test: BackendUnderTest, device: DeviceFacts, limit_s: float = CHECK_LIMIT_S) -> None:
        self._under_test, self._device, self._limit_s = under_test, device, limit_s
        self._child: _Child | None = None
        self.hangs = self.ends = 0

    def __enter__(self) -> CheckProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, check: Check) -> Outcome:
        """The outcome of the check, also if it ended its process."""
        if self.hangs >= MOST_HANGS or self.ends >= MOST_ENDS:
            why = f"not run: {self.hangs} checks hung and {self.ends} ended their process before"
            return Outcome(check.name, "skipped", detail=why)
        began = time.perf_counter()
        try:
            child = self._started()
            outcome: Outcome = child.ask(check, self._limit_s)
        except _Ended as ended:
            return self._outcome_of_end(check, ended, time.perf_counter() - began)
        return _with_output(outcome, child.printed())

    def speeds(self, quick: bool) -> tuple[list[Speed], str]:
        """(the speeds, why there are none)"""
        try:
            found: list[Speed] = self._started().ask(SpeedRequest(quick), self._limit_s)
        except _Ended as ended:
            return [], str(ended)
        return found, ""

    def close(self) -> None:
        """Terminate the child."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _started(self) -> _Child:
        if self._child is None:
            self._child = _Child()
            self._child.ask((self._under_test, self._device), START_LIMIT_S)
            self._child.printed()
        return self._child

    def _outcome_of_end(self, check: Check, ended: _Ended, seconds: float) -> Outcome:
        self.close()
        self.hangs += ended.hung
        self.ends += not ended.hung
        if check.outside:  # the caps do not claim that it works
            return Outcome(check.name, "passed", seconds, detail=str(ended))
        snippet = check.snippet(self._under_test, self._device.kind)
        return Outcome(check.name, "failed", seconds, detail=str(ended), snippet=snippet)


class _Child:
    """A child process, its two pipes, and the files with its standard output and standard error."""

    def __init__(self) -> None:
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        self._read = [0, 0]
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs_in), str(theirs_out)],
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            pass_fds=(theirs_in, theirs_out),
            start_new_session=True,  # so that close() can kill the child together with its own children
            env=_environment(),
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._requests: IO[bytes] = os.fdopen(ours_out, "wb")
        self._answers: IO[bytes] = os.fdopen(ours_in, "rb")

    def ask(self, request: Any, limit_s: float) -> Any:
        """The answer to a request. Raises :class:`_Ended` with the reason if there is none."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(pickle.dumps(request))
            self._requests.flush()
        end = time.monotonic() + limit_s
        while not select.select([self._answers], [], [], _SLICE_S)[0]:
            if self._process.poll() is not None:  # a grandchild may still hold its pipe
                break
            if time.monotonic() > end:
                raise self._hung(limit_s)
        else:
            # The child may die in the middle of an answer.
            with contextlib.suppress(EOFError, pickle.UnpicklingError):
                return pickle.load(self._answers)
        raise self._died()

    def printed(self) -> dict[str, str]:
        """Output since the last call, by stream."""
        texts = {}
        for place, name in enumerate(("standard output", "standard error")):
            file = self._files[place]
            file.seek(self._read[place])
            data = file.read()
            self._read[place] += len(data)
            texts[name] = data.decode(errors="replace")
        return texts

    def close(self) -> None:
        """Terminate it and its own children."""
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for file in self._files:
            file.close()

    def _hung(self, limit_s: float) -> _Ended:
        self._process.send_signal(signal.SIGABRT)  # faulthandler then prints where it hangs
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)
        return _Ended(f"it did not end within {limit_s:g} s{self._where()}", hung=True)

    def _died(self) -> _Ended:
        code = self._process.wait()
        if code < 0:
            return _Ended(f"it ended the process by {signal.Signals(-code).name}{self._where()}")
        last = self.printed()["standard error"].strip().splitlines()[-1:]
        return _Ended(": ".join([f"it ended the process with exit code {code}", *last]))

    def _where(self) -> str:
        """The innermost frame outside libraries, such as `` (kernel.py:12, in forward)``; empty if there is none."""
        for stack in _STACK.findall(self.printed()["standard error"])[-1:]:
            return line_of(_FRAME.findall(stack))
        return ""


def _environment() -> dict[str, str]:
    """The environment of a child: waiting OpenMP threads sleep instead of spinning."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    # Checks use small tensors, between which spinning threads would take most of the time of a busy machine.
    return {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": path}


def _with_output(outcome: Outcome, printed: dict[str, str]) -> Outcome:
    """Add a note with what a check printed, which belongs neither in a server's log nor in ``--json``."""
    said = [f"it printed to {name}: {text.strip()[:_SHOWN]!r}" for name, text in printed.items() if text.strip()]
    if not said:
        return outcome
    status = "note" if outcome.status == "passed" else outcome.status
    return replace(outcome, status=status, detail="; ".join(filter(None, [outcome.detail, *said])))


def run_isolated(
    process: CheckProcess, outside: CheckProcess, checks: Iterable[Check], finished: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run checks in order; those outside the caps in a separate process, because they may damage it."""
    outcomes = []
    for check in checks:
        outcomes.append((outside if check.outside else process).run(check))
        finished(outcomes[-1])
    return outcomes
