"""Runs a capsule on a backend without the model, and compares with the recorded result and the float64 reference."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minisgl_core import __version__
from minisgl_core.errors import BackendError, UsageError
from minisgl_core.plugin_api import BackendSpec
from minisgl_core.registry.matching import match
from minisgl_core.testing import BackendUnderTest, DeviceFixture, Mismatch
from minisgl_core.testing.device_fixture import dtype_named
from minisgl_core.testing.timing import Timer, median_seconds

from .base import Capsule
from .difference import worst
from .format import load_capsule
from .roles import ROLES
from .run import Run

if TYPE_CHECKING:
    from minisgl_core.plugin_api import Caps

__all__ = ["LayerResult", "ReplayReport", "check_capsule", "replay"]


@dataclass(frozen=True, slots=True)
class LayerResult:
    """Worst errors of one layer, ``|got - want| / (scale + |want|)``: attention's scale is 1, that of experts the size
    of the token's result. What the backend's own stated tolerance explains does not count in ``error``.
    """

    layer: int
    error: float
    """Error of the backend against the float64 reference"""
    against_recorded: float
    """Error of the backend against the recorded result; infinity where the recorded backend raised"""
    recorded_error: float
    """Error of the recorded result against the float64 reference"""
    worst: str
    """Where the largest ``error`` is, and the two values"""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of a replay. The float64 reference decides: what was recorded may itself be wrong."""

    capsule: str
    role: str
    recorded_by: str
    backend: str
    device: str
    versions: Mapping[str, str]
    tolerance: float
    layers: tuple[LayerResult, ...]
    raised: str = ""
    """The exception that the backend raised instead of a result"""
    metadata_us: float | None = None
    """Median time of the step's metadata, for roles that have metadata"""
    layer_us: float | None = None
    """Median time of one layer"""

    @property
    def passed(self) -> bool:
        return not self.raised and all(layer.error <= self.tolerance for layer in self.layers)

    @property
    def worst(self) -> LayerResult | None:
        """The layer with the largest error."""
        return max(self.layers, key=lambda layer: layer.error, default=None)

    def failure(self) -> str:
        """What is wrong in one line; empty if it passed."""
        if self.raised:
            return f"{self.backend} raised {self.raised}"
        found = self.worst
        if self.passed or found is None:
            return ""
        return f"layer {found.layer}: {found.worst} (error {found.error:.3g}, allowed {self.tolerance:.3g})"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {**asdict(self), "passed": self.passed, "layers": [_finite(asdict(layer)) for layer in self.layers]}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def replay(
    capsule: Capsule,
    under_test: BackendUnderTest,
    fixture: DeviceFixture,
    *,
    repeats: int = 20,
    timer: Timer | None = None,
) -> ReplayReport:
    """Run every layer of a capsule once, judge the results, and time them (``repeats`` 0 = do not).

    Raises :class:`BackendError` with all reasons for a capsule outside the backend's declared caps.
    """
    caps = _caps_of(capsule, under_test, fixture)
    with fixture.active():
        run = ROLES[capsule.ROLE].run(capsule, under_test, caps, fixture)
        report = _judged(capsule, under_test, fixture, run, caps.tolerance)
        if repeats and not report.raised:
            times = run.times(timer or partial(median_seconds, repeats=repeats))
            metadata_us = None if times.metadata is None else times.metadata * 1e6
            report = replace(report, metadata_us=metadata_us, layer_us=times.layer * 1e6)
        run.close()
    return report


def check_capsule(path: str | Path, backend: BackendSpec | str, *, device: str = "auto") -> None:
    """For tests: raise :class:`~minisgl_core.testing.Mismatch` unless the backend computes a capsule right.

    ``backend``: ``"ROLE:NAME"`` of an installed plugin, or a spec.
    """
    fixture, capsule = DeviceFixture(device), load_capsule(path)
    report = replay(capsule, BackendUnderTest.of(backend, fixture.facts, role=capsule.ROLE), fixture, repeats=0)
    if not report.passed:
        raise Mismatch(report.failure())


def _caps_of(capsule: Capsule, under_test: BackendUnderTest, fixture: DeviceFixture) -> Caps:
    role = capsule.ROLE
    if under_test.spec.role != role:
        raise UsageError(
            f"{under_test.label} is a backend of role {under_test.spec.role}, and the capsule is of {role}",
            field="--backend",
            value=under_test.label,
            remedy=f"write {role}:NAME",
        )
    caps, reasons = match(under_test.spec, ROLES[role].requirement(capsule, fixture.facts))
    if caps is None:
        why = "; ".join(map(str, reasons))
        raise BackendError(
            f"{under_test.label} cannot run this capsule ({capsule.summary()}): {why}",
            field="--backend",
            value=under_test.label,
            remedy="name a backend that declares it",
        )
    return caps


def _judged(
    capsule: Capsule, under_test: BackendUnderTest, fixture: DeviceFixture, run: Run, stated: float
) -> ReplayReport:
    raised, results = "", []
    try:
        for out in run.results():
            results.append(out)  # noqa: PERF402 - those before an exception count
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    layers = []
    for place, out in enumerate(results):
        want = capsule.layers[place].out.shape
        if out.shape != want:
            raised = f"nothing, but returned shape {tuple(out.shape)} instead of {tuple(want)}"
            break
        layers.append(_compare(capsule, place, out, stated))
    return ReplayReport(
        capsule=capsule.summary(),
        role=capsule.ROLE,
        recorded_by=str(capsule.origin.get("backend", "")),
        backend=under_test.label,
        device=f"{fixture.facts} {fixture.facts.name}".rstrip(),
        versions={**_versions(), under_test.distribution: under_test.version},
        tolerance=capsule.tolerance(dtype_named(capsule.geometry.dtype)),
        layers=tuple(layers),
        raised=raised,
    )


def _compare(capsule: Capsule, place: int, out: torch.Tensor, stated: float) -> LayerResult:
    layer, want = capsule.layers[place], capsule.expected(place)
    real, scale = len(want), capsule.scale(place, want)
    slack = capsule.slack(place, stated) if stated else 0.0
    recorded, found = layer.out[:real], worst(out[:real], want, scale, slack)
    lost = bool(recorded.isnan().all())
    return LayerResult(
        layer.layer_id,
        found.error,
        math.inf if lost else worst(out[:real], recorded, scale).error,
        math.inf if lost else worst(recorded, want, scale).error,
        f"{capsule.locate(place, found)}: expected {found.want:.6g}, got {found.got:.6g}",
    )


def _versions() -> dict[str, str]:
    return {"minisgl-core": __version__, "torch": importlib.metadata.version("torch")}
