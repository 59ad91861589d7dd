"""Choosing checks: by name, and a part of them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from minisgl_core.errors import UsageError, nearest

from .checks import Check
from .process import sessions_of

__all__ = ["named", "parse_part", "part_of"]


def named(checks: Sequence[Check], patterns: Iterable[str]) -> list[Check]:
    """The checks whose name one of the shell patterns matches, in the catalogue's order.

    Raises :class:`UsageError` for a pattern that matches nothing.
    """
    wanted = list(patterns)
    names = [check.name for check in checks]
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"no check is named {pattern!r}",
                field="--only",
                value=pattern,
                remedy=nearest(pattern, names) or "see --list",
            )
    return [check for check in checks if any(fnmatchcase(check.name, pattern) for pattern in wanted)]


def parse_part(text: str) -> tuple[int, int]:
    """``"2/3"`` -> (2, 3). Raises :class:`UsageError` for anything that is no part."""
    index, slash, count = text.partition("/")
    if slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count):
        return int(index), int(count)
    raise UsageError(f"--part is {text!r}", field="--part", value=text, remedy="write such as 2/3")


def part_of(checks: Sequence[Check], index: int, count: int) -> list[Check]:
    """Part ``index`` (from 1) of ``count``, in the catalogue's order. Sessions stay whole; the dearest are dealt first,
    each to the part that has least to do, so that equal catalogues are always cut alike.
    """
    sessions = {name: sum(check.seconds for check in some) for name, some in sessions_of(checks).items()}
    costs = [0.0] * count
    mine: set[str] = set()
    for name in sorted(sessions, key=lambda name: (-sessions[name], name)):
        least = costs.index(min(costs))
        costs[least] += sessions[name]
        if least == index - 1:
            mine.add(name)
    return [check for check in checks if check.process in mine]
