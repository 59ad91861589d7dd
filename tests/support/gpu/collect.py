"""The list of checks: the tests that pytest collects from ``tests/gpu``, all of them or some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import pytest

from minisgl_core.builtin.devices import detect_device
from minisgl_core.errors import UsageError, nearest
from minisgl_core.registry import DeviceFacts

from .check import ROOT, Check, Context

__all__ = [
    "CONTEXT",
    "FOLDER",
    "LISTED",
    "collected",
    "context_of",
    "named",
    "parse_part",
    "part_of",
    "pytest_arguments",
    "sessions_of",
]

FOLDER: Final = ROOT / "tests" / "gpu"
CONTEXT: Final = pytest.StashKey[Context]()
"""Where the tests' fixtures find it in pytest's config"""


LISTED: Final = DeviceFacts("cuda", sm=90, name="NVIDIA H200")
"""The device whose checks are listed where there is no GPU"""


def context_of(config: pytest.Config) -> Context:
    """The context of ``make gpu-check``; in a plain run of pytest that of the GPU here, or of one elsewhere."""
    if CONTEXT not in config.stash:
        device = detect_device("auto")
        elsewhere = device.kind == "cpu"
        config.stash[CONTEXT] = Context(LISTED if elsewhere else device, False, Path(), elsewhere=elsewhere)
    return config.stash[CONTEXT]


class _Listing:
    def __init__(self, context: Context) -> None:
        self.context, self.checks, self.problems = context, list[Check](), list[str]()

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[CONTEXT] = self.context

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.problems.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.checks = [Check.of(item) for item in session.items]


def pytest_arguments(folder: Path) -> list[str]:
    """Settings of ``tests/gpu``, which need no plugin of pytest."""
    return [f"--rootdir={ROOT}", "-c", str(folder / "pytest.ini"), "-p", "no:terminal", "-p", "no:cacheprovider", "-s"]


def collected(context: Context, folder: Path = FOLDER) -> list[Check]:
    """The checks for the context's device, with ``quick`` those that need no long compilation."""
    listing = _Listing(context)
    pytest.main([*pytest_arguments(folder), "--collect-only", str(folder)], plugins=[listing])
    if listing.problems:
        raise RuntimeError("the checks cannot be listed:\n" + "\n".join(listing.problems))
    return [check for check in listing.checks if check.quick or not context.quick]


def sessions_of(checks: Iterable[Check]) -> dict[str, list[Check]]:
    """Checks by session, in their order."""
    sessions: dict[str, list[Check]] = {}
    for check in checks:
        sessions.setdefault(check.process, []).append(check)
    return sessions


def named(checks: Sequence[Check], patterns: Sequence[str]) -> list[Check]:
    """The checks whose name one of the shell patterns matches, in their order.

    Raises :class:`UsageError` for a pattern that matches nothing.
    """
    names = [check.name for check in checks]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"no check is named {pattern!r}",
                field="--only",
                value=pattern,
                remedy=nearest(pattern, names) or "see --list",
            )
    return [check for check in checks if any(fnmatchcase(check.name, pattern) for pattern in patterns)]


def parse_part(text: str) -> tuple[int, int]:
    """``"2/3"`` -> (2, 3). Raises :class:`UsageError` for anything else."""
    index, slash, count = text.partition("/")
    if slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count):
        return int(index), int(count)
    raise UsageError(f"--part is {text!r}", field="--part", value=text, remedy="write such as 2/3")


def part_of(checks: Sequence[Check], index: int, count: int) -> list[Check]:
    """Part ``index`` (from 1) of ``count``, in order. Sessions stay whole. The longest are dealt first, each to the
    part with the least work, so that equal lists are always cut alike.
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
