"""Standard error may take nothing (a full disk, a reader that has gone): what is told is lost then, no answer is."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

__all__ = ["forgiving_stderr"]


@contextlib.contextmanager
def forgiving_stderr() -> Iterator[None]:
    """Until it ends, a failing write to ``sys.stderr``, whoever makes it, is the last one: the others go nowhere."""
    stream: TextIO | None = sys.stderr  # None if it was closed, whatever the annotations say
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
        """What is still buffered goes nowhere too: Python, flushing it at exit, would fail once more."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError):  # it may have no descriptor
            os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
