"""Survives an unwritable standard error (a full disk, an exited reader): messages are lost, answers are not."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

__all__ = ["forgiving_stderr"]


@contextlib.contextmanager
def forgiving_stderr() -> Iterator[None]:
    """While active, the first failing write to ``sys.stderr`` by any code disables it: later writes are discarded."""
    stream: TextIO | None = sys.stderr  # None if it was closed, despite its annotation
    if stream is None:
        yield
        return
    with contextlib.redirect_stderr(cast("TextIO", _Forgiving(stream))):
        yield


class _Forgiving:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        """Discard buffered text as well: Python would fail again when it flushes at exit."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError):  # it may have no descriptor
            os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
