"""Times every backend that would fit, for each plan entry and size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from minisgl_core.calibration.store import Calibration, Point, is_timed, scope_of, sources_of, versions_now
from minisgl_core.installation import Installed
from minisgl_core.plugin_api import Role
from minisgl_core.registry import PlanEntry, PlanQuery, Registry, resolve_plan
from minisgl_core.registry.query import Joint
from minisgl_core.registry.solve import Field, fields_of, joint_domain
from minisgl_core.testing import BackendUnderTest, DeviceFixture
from minisgl_core.testing.timing import Timer, median_seconds

from .grid import Size, sizes_of
from .work import Contender, prepare

if TYPE_CHECKING:
    from minisgl_core.modelconfig import ModelConfig

__all__ = ["MEASURED", "calibrate"]

logger = logging.getLogger(__name__)
MEASURED: Final[tuple[Role, ...]] = ("attention", "kv", "moe", "ops", "linear")
"""Graph runners and communicators serve no call that could be timed alone."""

NOISE_CHECKS: Final = 6
"""How many times the first job is measured again during the run, to see the noise."""

Progress = Callable[[str, int], Callable[[], None]]


def calibrate(
    query: PlanQuery,
    model: ModelConfig,
    registry: Registry,
    fixture: DeviceFixture,
    *,
    max_prefill_tokens: int = 8192,
    quick: bool = False,
    timer: Timer | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Measure all backends that would fit, whatever names the config has.

    What raises is noted and left out. Raises :class:`~minisgl_core.errors.BackendError` where there is no plan at all.
    """
    query = replace(query, backends={}, calibration=None, calibration_by_batch={})
    plan = resolve_plan(query, registry)
    joint = Joint(plan.page_size, plan.kv_layout, plan.graph)
    scope = scope_of(query, model)
    timer = timer or partial(median_seconds, repeats=5 if quick else 11, least=2e-3)
    contenders = _contenders(query, joint, registry)
    sizes = sizes_of(query, model, max_prefill_tokens, quick)
    jobs = [(size, one) for size in sizes for one in contenders.get(_general(size.entry), ())]
    finished = progress("Calibrating", len(jobs)) if progress is not None and jobs else None
    points, notes, equal, sources = [], list[str](), list[float](), sources_of(registry)
    step = max(1, len(jobs) // NOISE_CHECKS)
    with fixture.active():
        for place, (size, one) in enumerate(jobs):
            try:
                point = _point(size, one, query, model, scope, fixture, timer)
                points.append(replace(point, source=sources.get(one.label.rpartition("@")[2], "")))
                if place % step == 0:  # the same job throughout the run shows the noise
                    equal.append(_point(*jobs[0], query, model, scope, fixture, timer).microseconds)
            except Exception as error:
                at = f"{size.rows} rows" + (f" of {size.length} tokens" if size.length else "")
                why = " ".join(str(error).split())  # a compiler's log has many lines
                notes.append(f"{size.entry.label}: {one.label} failed at {at}: {type(error).__name__}: {why}")
                logger.warning("%s", notes[-1])
            if finished is not None:
                finished()
    noise = max(equal) / min(equal) - 1 if equal and min(equal) > 0 else 0.0
    return Calibration(scope, versions_now(query), tuple(points), tuple(notes), round(noise, 3))


def _point(
    size: Size,
    one: Contender,
    query: PlanQuery,
    model: ModelConfig,
    scope: dict[str, object],
    fixture: DeviceFixture,
    timer: Timer,
) -> Point:
    job = prepare(size, one, replace(query, page_size=one.page_size), model, scope, fixture)
    try:
        seconds = timer(job.call, fixture) / job.times
    finally:
        fixture.platform.synchronize()
        job.close()
    return Point(
        entry=size.entry.label,
        rows=size.rows,
        length=size.length,
        backend=one.label,
        version=one.under_test.version,
        microseconds=seconds * 1e6,
        captured=job.captured,
        page_size=one.page_size if size.entry.role in ("attention", "kv") else None,
    )


def _general(entry: PlanEntry) -> PlanEntry:
    """Weights of all shapes have the same contenders."""
    return entry._replace(shape=None)


def _contenders(query: PlanQuery, joint: Joint, registry: Registry) -> dict[PlanEntry, list[Contender]]:
    """The backends that fit each plan entry, at the plan's own page size if possible, else at the first that fits."""
    fields = [field for field in fields_of(query, registry, Installed(), {}) if field.entry.role in MEASURED]
    joints = [joint, *(other for other in joint_domain(query, fields) if other.graph == joint.graph)]
    return {field.entry: _fitting(field, joints) for field in fields}


def _fitting(field: Field, joints: Sequence[Joint]) -> list[Contender]:
    found: dict[str, Contender] = {}
    for joint in joints:
        for verdict in field.verdicts(joint):
            item = verdict.candidate
            if verdict.caps is not None and item.key not in found and is_timed(item.spec):
                options = field.query.options.get(f"{item.spec.role}:{item.spec.name}", {})
                under_test = BackendUnderTest(item.spec, item.distribution, item.version, options=options)
                found[item.key] = Contender(under_test, item.label, verdict.caps, joint.page_size)
    return list(found.values())
