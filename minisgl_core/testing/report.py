"""The report card of one backend on one machine."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from minisgl_core import __version__
from minisgl_core.errors import UsageError
from minisgl_core.plugin_api import AnyValue, BackendSpec

from .check_process import CHECK_LIMIT_S, CheckProcess, run_isolated
from .run import Outcome
from .speed import Speed
from .suite import checks_of

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest
    from .check import Check
    from .device_fixture import DeviceFixture

__all__ = ["Report", "verify"]

SOME_NAMES: Final = 6
"""Most names that are listed in the error about an unknown check."""
STATUSES: Final = ("passed", "failed", "note", "refused", "skipped")


@dataclass(frozen=True)
class Report:
    """The results of ``minisgl verify``."""

    backend: str
    spec: BackendSpec
    device: dict[str, Any]
    versions: dict[str, str]
    outcomes: tuple[Outcome, ...]
    speeds: tuple[Speed, ...]
    quick: bool
    seconds: float

    @property
    def passed(self) -> bool:
        """No check failed, and some passed, with or without a note."""
        counts = self.counts()
        return not counts["failed"] and bool(counts["passed"] or counts["note"])

    def counts(self) -> Counter[str]:
        """Checks by status."""
        return Counter(outcome.status for outcome in self.outcomes)

    def of_status(self, status: str) -> list[Outcome]:
        """The outcomes of one status."""
        return [outcome for outcome in self.outcomes if outcome.status == status]

    def worst_errors(self) -> dict[str, tuple[float, str]]:
        """The worst error and its check, by dtype."""
        worst: dict[str, tuple[float, str]] = {}
        for outcome in self.outcomes:
            for dtype, error in outcome.errors.items():
                worst[dtype] = max(worst.get(dtype, (0.0, "")), (error, outcome.name))
        return worst

    @property
    def finite_tail(self) -> bool:
        """True if the backend relies on finite values in the unused tail of a page; the tail was then zero instead of
        NaN.
        """
        return any(caps.finite_tail for caps in self.spec.caps)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        counts = self.counts()
        return {
            "backend": self.backend,
            "passed": self.passed,
            "quick": self.quick,
            "device": self.device,
            "versions": self.versions,
            "spec": _plain(asdict(self.spec)),
            "finite_tail": self.finite_tail,
            "checks": {"run": len(self.outcomes), **{status: counts[status] for status in STATUSES}},
            "worst_errors": {k: {"error": e, "check": name} for k, (e, name) in self.worst_errors().items()},
            "speeds": [speed.to_json() for speed in self.speeds],
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
            "seconds": round(self.seconds, 2),
        }


def verify(
    under_test: BackendUnderTest,
    fixture: DeviceFixture,
    *,
    quick: bool = False,
    only: str = "",
    limit_s: float = CHECK_LIMIT_S,
    started: Callable[[int], None] | None = None,
    finished: Callable[[Outcome], None] | None = None,
) -> Report:
    """Run and time the checks of this backend's role and caps whose name contains ``only``.

    They run in child processes, each for at most ``limit_s`` seconds. ``started`` is called with the number of checks,
    ``finished`` with each outcome. Raises :class:`UsageError` if no name contains ``only``.
    """
    began = time.perf_counter()
    checks = _checks(under_test, fixture, quick, only)
    if started is not None:
        started(len(checks))
    with (
        CheckProcess(under_test, fixture.facts, limit_s) as process,
        CheckProcess(under_test, fixture.facts, limit_s) as outside,
    ):
        outcomes = run_isolated(process, outside, checks, finished or (lambda _: None))
        speeds: Sequence[Speed] = ()
        if not only and all(outcome.status != "failed" for outcome in outcomes):
            speeds, problem = process.speeds(quick)
            if problem:
                outcomes.append(Outcome("speeds", "failed", detail=problem))
    return Report(
        backend=under_test.label,
        spec=under_test.spec,
        device={"kind": fixture.facts.kind, "sm": fixture.facts.sm, "name": fixture.facts.name or platform.processor()},
        versions=_versions(under_test, fixture),
        outcomes=tuple(outcomes),
        speeds=tuple(speeds),
        quick=quick,
        seconds=time.perf_counter() - began,
    )


def _checks(under_test: BackendUnderTest, fixture: DeviceFixture, quick: bool, only: str) -> list[Check]:
    every = checks_of(under_test, fixture, quick=quick)
    checks = [check for check in every if only in check.name]
    if only and not checks:
        some = ", ".join(check.name for check in every[:: len(every) // SOME_NAMES + 1])
        values = " (--quick has fewer)" if quick else ""
        raise UsageError(
            f"no check's name holds {only!r}", field="--check", value=only, remedy=f"some of the names{values}: {some}"
        )
    return checks


def _versions(under_test: BackendUnderTest, fixture: DeviceFixture) -> dict[str, str]:
    versions = {"minisgl-core": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if under_test.installed:
        versions[under_test.distribution] = under_test.version
    if fixture.facts.driver:
        versions["driver"] = fixture.facts.driver
    for name in ("triton", "flashinfer-python", "flash-attn", "flash-attn-3", "apache-tvm-ffi"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _plain(value: Any) -> Any:
    """The fields of a spec as JSON data."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, AnyValue):
        return "ANY"
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
