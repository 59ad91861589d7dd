"""Every error that users can meet: one line with the fault, the value and the remedy; longer errors add lines below.

The command line prints ``str(error)`` and exits with ``exit_code``; it shows a traceback only with ``--debug``.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

__all__ = [
    "AdmissionError",
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "MinisglError",
    "UsageError",
    "nearest",
    "unknown_name",
]

_SAME: Final = 0.8
"""Lowest similarity of two words that count as the same word with a typing error."""
_BREAKS: Final = r"_.:+\s()-"
"""Separates words, also in names that are phrases, such as ``attention fa+flashinfer``."""
_WORDS: Final = re.compile(f"[^{_BREAKS}]+")


def nearest(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` for the known name closest to a mistyped one; empty if none is close.

    A prefix that all names share, such as ``MINISGL_``, does not count. A name that contains all words of the mistyped
    one (``OVERLAP``: ``DISABLE_OVERLAP_SCHEDULING``) is preferred to one that is only similar.
    """
    names = sorted(known)
    shared = len(_shared_words([name, *names])) if len(names) > 1 else 0
    rest, rests = name[shared:], {known[shared:]: known for known in names}
    wordy = [other for other in rests if _has_words(other, rest)]
    attempts = ((list(rests), _SAME), (wordy, 0.0), (list(rests), 0.5 if shared else 0.6))
    close = next((found for among, cutoff in attempts if (found := _closest(rest, among, cutoff))), None)
    return "" if close is None else f"did you mean {rests[close]!r}?"


def _closest(name: str, among: Sequence[str], cutoff: float) -> str | None:
    return next(iter(difflib.get_close_matches(name, among, n=1, cutoff=cutoff)), None)


def _has_words(name: str, wanted: str) -> bool:
    """True if each word of ``wanted`` occurs in ``name``, except for typing errors."""
    words = _WORDS.findall(name)
    return all(_closest(word, words, _SAME) for word in _WORDS.findall(wanted) or [""])


def _shared_words(names: Sequence[str]) -> str:
    """The common prefix of all names, cut at the end of a word."""
    ends = zip(min(names), max(names), strict=False)  # what these two share, all between them share
    shared = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
    match = re.match(f".*[{_BREAKS}]", shared)
    return match[0] if match else ""


class MinisglError(Exception):
    """Base class of all errors for users.

    ``field`` is the setting, parameter or file at fault, ``value`` its value, ``remedy`` what to do, and ``details``
    the lines that follow the first one.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        value: object = None,
        remedy: str = "",
        details: Sequence[str] = (),
    ) -> None:
        self.message, self.field, self.value, self.remedy, self.details = message, field, value, remedy, tuple(details)
        self.headline = f"{message}; {remedy}" if remedy else message
        super().__init__("\n  ".join((self.headline, *details)))


class UsageError(MinisglError):
    """The call is invalid: an unknown name, a value out of range, a path that does not exist."""

    exit_code = 2


class ConfigError(UsageError):
    """A config key or value that minisgl does not accept."""


class AdmissionError(UsageError):
    """A prompt or sampling parameter that this engine refuses; other requests are not affected."""


class CheckpointError(MinisglError):
    """A model folder or file that cannot be loaded; names the file or tensor."""


class BackendError(MinisglError):
    """No backend can serve the request; the message has the reasons of each candidate."""


class EngineError(MinisglError):
    """The engine failed at run time, or a rank died."""


def unknown_name(owner: str, name: str, value: object, known: Iterable[str], hints: Mapping[str, str]) -> UsageError:
    """The error for a keyword that ``owner`` does not have. ``hints``: names in other libraries -> what to use here."""
    names = sorted(known)
    remedy = hints.get(name) or nearest(name, names) or f"known are {', '.join(names)}"
    return UsageError(f"{owner} has no parameter `{name}`", field=name, value=value, remedy=remedy)
