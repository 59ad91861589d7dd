"""Code of plugins runs as a guest: what it prints goes to standard error, and it cannot end the process unseen.

Standard output belongs to the command: an answer, or one JSON document.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

__all__ = ["ProcessEndsError", "Stream", "as_guest", "told_if_slow"]

SLOW_S: Final = 5.0
_STDOUT: Final = 1
_STDERR: Final = 2


class ProcessEndsError(BaseException):
    """A guest called ``os._exit``. It is no ``Exception``, so that the guest's own handlers let it pass."""


class Stream(io.TextIOBase):
    """A guest's standard output. ``printed``: how what Python code has written begins."""

    def __init__(self) -> None:
        self.printed = ""

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """To standard error, if there is one."""
        if not self.printed:
            self.printed = text.strip().partition("\n")[0]
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be closed, or None
            sys.stderr.write(text)
        return len(text)


@contextlib.contextmanager
def as_guest() -> Iterator[Stream]:
    """In this block standard output is standard error, for compiled code too, and ``os._exit`` raises
    :class:`ProcessEndsError`.
    """
    with _diverted() as stream, _refusing_exit():
        yield stream


class _Diversion:
    """Descriptor 1 is the process's, whatever the thread: the first guest diverts it, the last one gives it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._guests = 0
        self._stdout: Any = None
        self._descriptor: int | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Stream]:
        stream = Stream()
        with self._lock:
            if self._guests == 0:
                self._divert()
            self._guests += 1
            before, sys.stdout = sys.stdout, stream
        try:
            yield stream
        finally:
            with self._lock:
                self._guests -= 1
                sys.stdout = before
                if self._guests == 0:
                    self._give_back()

    def _divert(self) -> None:
        self._stdout, self._descriptor = sys.stdout, None
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be closed, or None
            self._stdout.flush()
        with contextlib.suppress(OSError):  # either may be closed; the copy may not take the other's place
            self._descriptor = fcntl.fcntl(_STDOUT, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1)
            os.dup2(_STDERR, _STDOUT)

    def _give_back(self) -> None:
        sys.stdout = self._stdout
        if self._descriptor is None:
            return
        if "ctypes" in sys.modules:  # compiled code prints into a buffer of its own
            sys.modules["ctypes"].CDLL(None).fflush(None)
        os.dup2(self._descriptor, _STDOUT)
        os.close(self._descriptor)


_diverted: Final = _Diversion()


@contextlib.contextmanager
def _refusing_exit() -> Iterator[None]:
    """Only here and in this thread: what a guest forks ends as always, and so does what keeps the function."""
    real = os._exit
    inside, owner = True, (os.getpid(), threading.get_ident())

    def refuse(status: int) -> NoReturn:
        if inside and owner == (os.getpid(), threading.get_ident()):
            raise ProcessEndsError(f"it calls os._exit({status}), which would end every command")
        real(status)

    os._exit = refuse
    try:
        yield
    finally:
        inside = False
        os._exit = real


@contextlib.contextmanager
def told_if_slow(patience_s: float = SLOW_S) -> Iterator[Callable[[str], None]]:
    """Yields ``doing(text)``, which says what is done from now on. What goes on for longer than ``patience_s`` is told
    on standard error meanwhile: it may never end.
    """
    now, ended = ("", 0.0), threading.Event()

    def watch() -> None:
        told = 0.0
        while not ended.wait(min(patience_s, 1.0)):
            text, since = now
            if text and since != told and time.monotonic() - since >= patience_s:
                told = since
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(f"{text} takes more than {patience_s:g} s\n")

    def doing(text: str) -> None:
        nonlocal now
        now = text, time.monotonic()

    threading.Thread(target=watch, name="minisgl-told-if-slow", daemon=True).start()
    try:
        yield doing
    finally:
        ended.set()
