"""Every error a user can meet. One line: what, which value, what to do; what has more to say adds lines below it.

The command line prints ``str(error)`` and exits with ``exit_code``; a traceback appears only with ``--debug``.
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
"""How similar two words are, of which one is the other with a slip."""
_BREAKS: Final = r"_.:+\s()-"
"""Between words, also of names that are phrases, such as ``attention fa+flashinfer``."""
_WORDS: Final = re.compile(f"[^{_BREAKS}]+")


def nearest(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` for the known name closest to a mistyped one; empty if none is close.

    What all of them begin with, such as ``MINISGL_``, makes none of them closer. A name that has all words of the
    mistyped one (``OVERLAP``: ``DISABLE_OVERLAP_SCHEDULING``) goes before one that only looks similar.
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
    """Does each word of ``wanted`` stand in ``name``, but for a slip?"""
    words = _WORDS.findall(name)
    return all(_closest(word, words, _SAME) for word in _WORDS.findall(wanted) or [""])


def _shared_words(names: Sequence[str]) -> str:
    """The beginning that all have in common, up to the end of a word."""
    ends = zip(min(names), max(names), strict=False)  # what these two share, all between them share
    shared = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
    match = re.match(f".*[{_BREAKS}]", shared)
    return match[0] if match else ""


class MinisglError(Exception):
    """Base of all errors for users.

    ``field`` is the name of the setting, parameter or file at fault, ``value`` what it held, ``remedy`` what to do,
    ``details`` lines that follow the first one.
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


def unknown_name(owner: str, name: str, value: object, known: Iterable[str], hints: Mapping[str, str]) -> UsageError:
    """The error for a keyword that ``owner`` does not know. ``hints``: other libraries' name -> what to do here."""
    names = sorted(known)
    remedy = hints.get(name) or nearest(name, names) or f"known are {', '.join(names)}"
    return UsageError(f"{owner} has no parameter `{name}`", field=name, value=value, remedy=remedy)
