"""Running cases: one at a time, each to an :class:`Outcome`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from unittest import SkipTest

from .compare import Mismatch
from .outside import Outsider, check_refused
from .rig import Rig
from .subject import Subject

if TYPE_CHECKING:
    from minisgl_core.plugin_api import BackendSpec

    from .case import Case, Finding

__all__ = ["Outcome", "Status", "check", "run_case", "run_cases"]

Status = Literal["passed", "failed", "note", "skipped"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one case. ``detail``: why it failed or was skipped, or what the note says."""

    name: str
    status: Status
    seconds: float = 0.0
    errors: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    snippet: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "name": self.name,
            "status": self.status,
            "seconds": round(self.seconds, 4),
            "errors": dict(self.errors),
            "detail": self.detail or None,
            "snippet": self.snippet or None,
        }


def check(backend: BackendSpec | str, case: Case, *, device: str = "auto") -> Finding:
    """Run one case against one backend, here and now; raises what it finds.

    ``backend``: a spec, or ``"ROLE:NAME"`` of an installed plugin.
    """
    rig = Rig(device)
    return case.conform(Subject.of(backend, rig.facts), rig)


def run_case(subject: Subject, case: Case, rig: Rig, outsider: Outsider | None = None) -> Outcome:
    """Run one case. Outside the caps: ask resolving, then, if there is an ``outsider``, let it try."""
    began = time.perf_counter()

    def outcome(status: Status, detail: str = "", **more: Any) -> Outcome:
        return Outcome(case.name, status, time.perf_counter() - began, detail=detail, **more)

    try:
        if case.outside:
            check_refused(subject, case, rig)
            wrong = outsider.run(subject, case, rig.facts) if outsider is not None else "not tried"
            note = "under-claimed: it is right although the caps do not declare it"
            return outcome("passed", wrong) if wrong else outcome("note", note)
        finding = case.conform(subject, rig)
    except SkipTest as skipped:
        return outcome("skipped", str(skipped))
    except Exception as error:
        return outcome("failed", _told(error), snippet=case.snippet(subject, rig.facts.kind))
    return outcome("note" if finding.note else "passed", finding.note, errors=finding.errors)


def run_cases(
    subject: Subject,
    cases: Iterable[Case],
    rig: Rig,
    *,
    outsider: Outsider | None = None,
    finished: Callable[[Outcome], bool] | None = None,
) -> list[Outcome]:
    """Run them in order. ``finished`` hears of each outcome and stops the run by returning True."""
    outcomes = []
    for case in cases:
        outcomes.append(run_case(subject, case, rig, outsider))
        if finished is not None and finished(outcomes[-1]):
            break
    return outcomes


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
