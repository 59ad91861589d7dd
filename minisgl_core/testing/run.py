"""Runs checks in this process, each to an :class:`Outcome`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from unittest import SkipTest

from .backend_under_test import BackendUnderTest
from .compare import Mismatch
from .device_fixture import DeviceFixture
from .leftovers import nothing_running
from .refusal import check_refused, refusal_of
from .where import where_raised

if TYPE_CHECKING:
    from minisgl_core.plugin_api import BackendSpec

    from .check import Check, Result

__all__ = ["Outcome", "Status", "assert_conforms", "run_check", "run_checks"]

Status = Literal["passed", "failed", "note", "refused", "skipped"]
"""``refused``: the backend raised :class:`~minisgl_core.plugin_api.CannotRun`, so it cannot do this here."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one check. ``detail``: why it failed, was refused or was skipped, or the text of the note."""

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


def assert_conforms(backend: BackendSpec | str, check: Check, *, device: str = "auto") -> Result:
    """Run one check against one backend in this process; raises if it fails.

    ``backend``: a spec, or ``"ROLE:NAME"`` of an installed plugin.
    """
    fixture = DeviceFixture(device)
    return check.conform(BackendUnderTest.of(backend, fixture.facts), fixture)


def run_check(
    under_test: BackendUnderTest, check: Check, fixture: DeviceFixture, *, try_outside: bool = False
) -> Outcome:
    """Run one check.

    Outside the caps resolving must refuse it; with ``try_outside`` the backend is run anyway, which is safe only in a
    separate process.
    """
    began = time.perf_counter()

    def outcome(status: Status, detail: str = "", **more: Any) -> Outcome:
        return Outcome(check.name, status, time.perf_counter() - began, detail=detail, **more)

    try:
        if check.outside:
            check_refused(under_test, check, fixture)
            wrong = _tried(under_test, check, fixture) if try_outside else "not tried"
            note = "under-claimed: it is right although the caps do not declare it"
            return outcome("passed", wrong) if wrong else outcome("note", note)
        with nothing_running():
            result = check.conform(under_test, fixture)
    except SkipTest as skipped:
        return outcome("skipped", str(skipped))
    except (Exception, SystemExit) as error:
        refusal = refusal_of(error)
        if refusal is not None:
            return outcome("refused", str(refusal))
        return outcome("failed", _text_of(error), snippet=check.snippet(under_test, fixture.facts.kind))
    return outcome("note" if result.note else "passed", result.note, errors=result.errors)


def _tried(under_test: BackendUnderTest, check: Check, fixture: DeviceFixture) -> str:
    """What went wrong; empty if the backend was correct although it does not claim to be."""
    try:
        check.conform(under_test, fixture)
    except SkipTest:
        raise
    except (Exception, SystemExit) as error:
        return _text_of(error)
    return ""


def run_checks(
    under_test: BackendUnderTest,
    checks: Iterable[Check],
    fixture: DeviceFixture,
    *,
    finished: Callable[[Outcome], bool] | None = None,
) -> list[Outcome]:
    """Run checks in order in this process, which a crash would end.

    ``finished`` is called with each outcome and stops the run by returning True.
    """
    outcomes = []
    for check in checks:
        outcomes.append(run_check(under_test, check, fixture))
        if finished is not None and finished(outcomes[-1]):
            break
    return outcomes


def _text_of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({'' if error.code is None else error.code})"
    return str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}{where_raised(error)}"
