"""The conformance kit on every installed backend that speaks of this device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from minisgl_core.installation import Installed, check_requires
from minisgl_core.plugin_api import BackendSpec, OneOf, Role
from minisgl_core.registry import Candidate, DeviceFacts, Registry
from minisgl_core.registry.matching import match
from minisgl_core.registry.query import Requirement

from .checks import Check, Failed, Here, Skipped

__all__ = ["backends_here", "checks", "label_of", "needs_of", "prebuilt"]

SECONDS: Final[Mapping[str, float]] = {"attention": 60.0, "ops": 40.0, "moe": 40.0, "kv": 30.0, "graph": 20.0}
OTHER_SECONDS: Final = 15.0
FULL: Final = 3.0
"""How many times longer than with ``--quick``."""
CASES: Final[Mapping[str, tuple[int, ...]]] = {
    "attention": (68, 89),
    "kv": (89,),
    "graph": (65,),
    "moe": (72, 74, 75, 89),
    "ops": (89,),
    "linear": (89,),
}
SHOWN: Final = 5
"""Failed checks that are told with their details."""


def _half_without_features(spec: BackendSpec) -> BackendSpec:
    boxes = tuple(
        replace(box, head_dims=OneOf(64, 128), features=frozenset()) for box in spec.caps if box.dtypes == ("bfloat16",)
    )
    return replace(spec, caps=boxes)


PREBUILT: Final[Mapping[tuple[str, str], Callable[[BackendSpec], BackendSpec]]] = {
    ("attention", "flashinfer"): _half_without_features
}
"""(role, name) -> the part of its caps whose kernels come with the library; the others are compiled for minutes."""


def prebuilt(spec: BackendSpec, may_compile: bool) -> BackendSpec:
    """The spec; unless kernels ``may_compile`` for minutes only that part of its caps which needs none."""
    narrow = PREBUILT.get((spec.role, spec.name))
    return spec if may_compile or narrow is None else narrow(spec)


def backends_here(registry: Registry, role: Role, device: DeviceFacts) -> list[Candidate]:
    """The backends of a role whose caps speak of this device, installed libraries or not."""
    required = Requirement(device=device)
    return [item for item in registry.candidates(role) if match(item.spec, required)[0] is not None]


def label_of(candidate: Candidate) -> str:
    """Such as ``attention:fa/fa3``."""
    spec = candidate.spec
    return f"{spec.role}:{spec.name}" + (f"/{spec.variant}" if spec.variant else "")


def needs_of(candidate: Candidate) -> tuple[str, ...]:
    """What must be installed for the backend, such as ``flashinfer`` or ``nvcc``."""
    every = [(item,) if isinstance(item, str) else item for item in candidate.spec.requires]
    return tuple(" or ".join(one.removeprefix("import:").removeprefix("exec:") for one in item) for item in every)


def checks(device: DeviceFacts, registry: Registry, quick: bool) -> list[Check]:
    """One check per backend."""
    from minisgl_core.testing.suite import SUITES

    found = []
    for role in SUITES:
        for candidate in backends_here(registry, role, device):
            seconds = SECONDS.get(role, OTHER_SECONDS) * (1.0 if quick else FULL)
            cases = CASES.get(role, ())
            if "route" in _operations(candidate.spec):
                cases = (*cases, 71)
            if "sample" in _operations(candidate.spec):
                cases = (*cases, 42, 45)
            run = partial(conforms, candidate)
            name, needs = f"conformance/{label_of(candidate)}", needs_of(candidate)
            found.append(Check(name, run, seconds, cases=cases, limit_s=10 * seconds, needs=needs))
    return found


def _operations(spec: BackendSpec) -> set[str]:
    return {op for box in spec.caps for op in box.ops}


def conforms(candidate: Candidate, here: Here) -> dict[str, Any]:
    """`minisgl verify ROLE:NAME` on this device."""
    from minisgl_core.testing import BackendUnderTest, DeviceFixture, verify

    missing = [str(reason) for reason in check_requires(candidate.spec, Installed())]
    if missing:
        raise Skipped(f"not installed: {'; '.join(missing)}")
    rig = DeviceFixture(here.device)
    subject = BackendUnderTest.of(candidate.key, rig.facts)
    subject = replace(subject, spec=prebuilt(subject.spec, here.may_compile))
    counts = {"passed": 0, "failed": 0, "note": 0, "refused": 0, "skipped": 0}

    def finished(outcome: Any) -> None:
        counts[outcome.status] += 1
        here.note(**counts)

    report = verify(subject, rig, quick=here.quick, finished=finished)
    worst = {f"worst {dtype}": error for dtype, (error, _) in report.worst_errors().items()}
    here.note(**worst, speeds=[speed.to_json() for speed in report.speeds])
    failed = report.of_status("failed")
    if failed:
        told = [f"{outcome.name}: {outcome.detail.splitlines()[0]}" for outcome in failed[:SHOWN]]
        raise Failed("\n".join([f"{len(failed)} of {len(report.outcomes)} checks failed:", *told]))
    if not report.passed:
        reasons = {outcome.detail for status in ("refused", "skipped") for outcome in report.of_status(status)}
        raise Skipped("no check could be run: " + "; ".join(sorted(reasons)))
    return {}
