"""Every error a user can meet. One line each: what, which value, what to do.

The command line prints ``str(error)`` and exits with ``exit_code``; a traceback appears only with ``--debug``.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Sequence

__all__ = [
    "AdmissionError",
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "MinisglError",
    "UsageError",
    "nearest",
]


def nearest(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` for the known name closest to a mistyped one; empty if none is close.

    What all of them begin with, such as ``MINISGL_``, makes none of them closer.
    """
    names = sorted(known)
    shared = len(_shared_words([name, *names])) if len(names) > 1 else 0
    rests = {known[shared:]: known for known in names}
    close = difflib.get_close_matches(name[shared:], rests, n=1, cutoff=0.5 if shared else 0.6)
    return f"did you mean {rests[close[0]]!r}?" if close else ""


def _shared_words(names: Sequence[str]) -> str:
    """The beginning that all have in common, up to the end of a word."""
    ends = zip(min(names), max(names), strict=False)  # what these two share, all between them share
    shared = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
    match = re.match(r".*[_.:-]", shared)
    return match[0] if match else ""


class MinisglError(Exception):
    """Base of all errors for users.

    ``field`` is the name of the setting, parameter or file at fault, ``value`` what it held, ``remedy`` what to do.
    """

    exit_code = 1

    def __init__(self, message: str, *, field: str = "", value: object = None, remedy: str = "") -> None:
        self.message, self.field, self.value, self.remedy = message, field, value, remedy
        super().__init__(f"{message}; {remedy}" if remedy else message)


class UsageError(MinisglError):
    """The call itself is wrong: an unknown name, a value out of range, a path that is not there."""

    exit_code = 2


class ConfigError(UsageError):
    """A config key or value that minisgl does not accept."""


class AdmissionError(UsageError):
    """A prompt or sampling parameter that this engine refuses; other requests are not affected."""


class CheckpointError(MinisglError):
    """A model folder or file that cannot be loaded; names the file or tensor."""


class BackendError(MinisglError):
    """No backend can do what was asked; carries the reasons of each candidate in its message."""


class EngineError(MinisglError):
    """The engine failed at run time, or a rank died."""
