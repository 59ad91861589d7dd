"""Output of results: JSON for programs, and short text for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .measure import Result
    from .session import Session
    from .workloads import Workload

__all__ = ["as_json", "one_line"]

_CUT: Final = " ..."


def as_json(
    workload: Workload, geometry: str, result: Result, session: Session, about: Mapping[str, Any]
) -> dict[str, Any]:
    """One result as plain data. ``about``: its :func:`~minisgl_core.bench.provenance.provenance`."""
    return {
        "mode": workload.mode,
        "geometry": geometry,
        **about,
        "repeat": len(result.runs),
        **result.to_json(),
        "workload": workload.facts(),
        "ceilings": asdict(session.ceilings),
        "start_s": session.start_s,
        "memory": session.memory.to_json(),
        "plan": session.plan.to_json(),
    }


def one_line(text: str, limit: int) -> str:
    """The text on one line of at most ``limit`` characters; a longer text is cut after a word and marked."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    room = limit - len(_CUT)
    words, space, _ = line[: room + 1].rpartition(" ")
    return (words.rstrip(",;:") if space else line[:room]) + _CUT
