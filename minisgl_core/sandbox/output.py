"""Standard output belongs to the command (an answer, or one JSON document), so plugins print to standard error."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["Output", "diverted_output", "notify_if_slow"]

SLOW_S: Final = 5.0
_STDOUT: Final = 1
_STDERR: Final = 2


class Output(io.TextIOBase):
    """A plugin's standard output. ``first_line``: the first line that Python code has written."""

    def __init__(self) -> None:
        self.first_line = ""

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """To standard error, if there is one."""
        if not self.first_line:
            self.first_line = text.strip().partition("\n")[0]
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be closed, or None
            sys.stderr.write(text)
        return len(text)


class _Diversion:
    """Descriptor 1 belongs to the whole process: the first block diverts it, the last one restores it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._stdout: Any = None
        self._descriptor: int | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Output]:
        """In this block standard output is standard error, for compiled code too."""
        output = Output()
        with self._lock:
            if self._blocks == 0:
                self._divert()
            self._blocks += 1
            before, sys.stdout = sys.stdout, output
        try:
            yield output
        finally:
            with self._lock:
                self._blocks -= 1
                sys.stdout = before
                if self._blocks == 0:
                    self._restore()

    def _divert(self) -> None:
        self._stdout, self._descriptor = sys.stdout, None
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be closed, or None
            self._stdout.flush()
        with contextlib.suppress(OSError):  # either may be closed; the copy may not take the other's place
            self._descriptor = fcntl.fcntl(_STDOUT, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1)
            os.dup2(_STDERR, _STDOUT)

    def _restore(self) -> None:
        sys.stdout = self._stdout
        if self._descriptor is None:
            return
        if "ctypes" in sys.modules:  # compiled code prints into a buffer of its own
            sys.modules["ctypes"].CDLL(None).fflush(None)
        os.dup2(self._descriptor, _STDOUT)
        os.close(self._descriptor)


diverted_output: Final = _Diversion()


@contextlib.contextmanager
def notify_if_slow(doing: str, patience_s: float = SLOW_S) -> Iterator[None]:
    """Report on standard error, while the block still runs, that it takes longer than ``patience_s``: it may hang."""

    def notify() -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"{doing} takes more than {patience_s:g} s\n")

    timer = threading.Timer(patience_s, notify)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
