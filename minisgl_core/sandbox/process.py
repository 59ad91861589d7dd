"""Questions that only running code can answer, asked in a throw-away process. Its crash or hang costs nothing else."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from minisgl_core import __version__
from minisgl_core.env import ENV

__all__ = ["Sandbox", "SandboxError"]

_PROGRAM: Final = "from minisgl_core.sandbox.child import main; main()"


class SandboxError(Exception):
    """The process died, or did not answer in time."""

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class Sandbox:
    """A child process that answers calls; started by the first one, and again after a crash."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = ENV.PROBE_TIMEOUT_S.value if timeout_s is None else timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        # a file: a pipe that is not read would block a child that prints much
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child. Calling it twice is harmless."""
        self._stop()
        self._errors.close()

    def call(
        self,
        function: str,
        argument: Mapping[str, Any],
        versions: Iterable[str] = (),
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """What ``"pkg.mod:fn"`` returned for the argument: ``ok`` and ``value``, or ``reason`` or ``error``.

        With ``versions`` (of all that the answer depends on) an answer that is ``ok`` is kept for later starts; others
        are requested again, since their readers repair what they name. Raises :class:`SandboxError` for a crash.
        """
        file = _kept_at(function, json.dumps(dict(argument)), *versions) if versions else None
        found = _read(file) if file else None
        if found is None:
            found = self._ask({"call": function, "with": dict(argument)}, timeout_s or self._timeout_s)
            if file and found["ok"]:
                _write(file, found)
        return found

    def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        process = self._process or self._start()
        if process.stdin is None or process.stdout is None:
            raise AssertionError("the child was started with pipes")
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._crash("could not start") from None
        # an answer is one short line, written at once: readable means that all of it is there
        readable, _, _ = select.select([process.stdout], [], [], timeout_s)
        if not readable:
            raise self._crash(f"did not answer within {timeout_s:g} s", timed_out=True)
        line = process.stdout.readline()
        if not line:
            raise self._crash("died")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        )
        return self._process

    def _crash(self, what: str, *, timed_out: bool = False) -> SandboxError:
        code = self._stop(patience_s=1.0 if what == "died" else 0.0)
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        ended = f" (exit code {code})" if what == "died" else ""
        return SandboxError(": ".join([what + ended, *last]), timed_out=timed_out)

    def _stop(self, patience_s: float = 1.0) -> int | None:
        """End the child, and the compilers it may have started; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            return process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()


def _kept_at(*question: str) -> Path:
    digest = hashlib.sha256(json.dumps([__version__, sys.executable, *question]).encode()).hexdigest()[:32]
    return ENV.CACHE_DIR.value / "probes" / f"{digest}.json"


def _read(file: Path) -> dict[str, Any] | None:
    try:
        answer = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def _write(path: Path, answer: Mapping[str, Any]) -> None:
    """To another file that is then renamed, so that two engines that start together never read half a file."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(json.dumps(answer))
        Path(file.name).replace(path)
