"""Every installed backend that claims the device: the conformance kit, and shapes with which users have met faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from minisgl_core.plugin_api import BackendSpec, LayerFacts, Phase
from minisgl_core.registry import Candidate
from minisgl_core.registry.matching import match
from minisgl_core.testing import AttentionCheck, BackendUnderTest, DeviceFixture, verify
from minisgl_core.testing.suite import SUITES
from support.gpu.backends import backends_of, parameter, prebuilt, require_installed
from support.gpu.check import Context, Failed, Skipped, expect
from support.gpu.collect import context_of

pytestmark = pytest.mark.gpu
SECONDS: Mapping[str, float] = {"attention": 60.0, "ops": 40.0, "moe": 40.0, "kv": 30.0, "graph": 20.0}
OTHER_SECONDS = 15.0
FULL = 3.0
"""Without ``--quick`` a check takes this much longer."""
CASES: Mapping[str, tuple[int, ...]] = {
    "attention": (68, 89),
    "kv": (89,),
    "graph": (65,),
    "moe": (72, 74, 75, 89),
    "ops": (89,),
    "linear": (89,),
}
OPERATION_CASES: Mapping[str, tuple[int, ...]] = {"route": (71,), "sample": (42, 45)}
SHOWN = 5
"""Failed checks of the kit that are reported with their details"""
COMPILING_S = 1800.0
"""FlashInfer compiles each head dimension without a prebuilt kernel for minutes."""
HEADS = ((9, 3), (15, 5), (14, 2), (12, 2), (40, 8), (24, 4), (28, 4), (64, 4), (8, 1), (7, 7))
DIMS = ((32, 32, 80), (32, 32, 96), (8, 1, 256), (3, 3, 80), (16, 8, 128))
LENGTHS = (1, 2, 15, 16, 17, 4097)
PAGES = (1, 16, 64, 256)
ROWS: Mapping[Phase, tuple[tuple[int, int], ...]] = {
    "prefill": ((33, 33), (1, 1), (8, 41)),
    "decode": ((1, 33), (1, 1), (1, 41)),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All roles that have a suite; for the shapes attention alone."""
    context = context_of(metafunc.config)
    if metafunc.function.__name__ == "test_conformance":
        every = [item for role in SUITES for item in backends_of(role, context)]
        parameters = [parameter(item, **_cost(item.spec, context.quick)) for item in every]
    else:
        parameters = [
            parameter(item, limit_s=COMPILING_S if item.spec.name == "flashinfer" else 0.0)
            for item in backends_of("attention", context)
        ]
    metafunc.parametrize("candidate", parameters)


def _cost(spec: BackendSpec, quick: bool) -> dict[str, Any]:
    seconds = SECONDS.get(spec.role, OTHER_SECONDS) * (1.0 if quick else FULL)
    operations = {op for caps in spec.caps for op in caps.ops}
    more = [number for op, numbers in OPERATION_CASES.items() if op in operations for number in numbers]
    return {"seconds": seconds, "limit_s": 10 * seconds, "cases": (*CASES.get(spec.role, ()), *more)}


def test_conformance(candidate: Candidate, context: Context) -> None:
    """`minisgl verify ROLE:NAME` on this device."""
    require_installed(candidate)
    fixture = DeviceFixture(context.device)
    under_test = BackendUnderTest.of(candidate.key, fixture.facts)
    under_test = replace(under_test, spec=prebuilt(under_test.spec, context.may_compile))
    counts = {"passed": 0, "failed": 0, "note": 0, "refused": 0, "skipped": 0}

    def finished(outcome: Any) -> None:
        counts[outcome.status] += 1
        context.note(**counts)

    report = verify(under_test, fixture, quick=context.quick, finished=finished)
    worst = {f"worst {dtype}": error for dtype, (error, _) in report.worst_errors().items()}
    context.note(**worst, speeds=[speed.to_json() for speed in report.speeds])
    failed = report.of_status("failed")
    if failed:
        lines = [f"{outcome.name}: {outcome.detail.splitlines()[0]}" for outcome in failed[:SHOWN]]
        text = "\n".join([f"{len(failed)} of {len(report.outcomes)} checks failed:", *lines])
        raise Failed(text, pytrace=False)
    if not report.passed:
        reasons = {outcome.detail for status in ("refused", "skipped") for outcome in report.of_status(status)}
        raise Skipped("no check could be run: " + "; ".join(sorted(reasons)))


@pytest.mark.check(seconds=20.0, cases=(1, 2, 16, 68))
def test_shapes(candidate: Candidate, context: Context) -> None:
    """Each shape is right, or the backend's caps refuse it with reasons."""
    require_installed(candidate)
    fixture = DeviceFixture(context.device)
    under_test = BackendUnderTest.of(candidate.key, fixture.facts)
    fast = prebuilt(under_test.spec, context.may_compile)
    counts = {"right": 0, "refused": 0, "left out": 0}
    wrong: list[str] = []
    for shape in shapes("bfloat16" if context.kind == "cuda" else "float32", context.tiny):
        fits, reasons = match(under_test.spec, shape.requirement(fixture))
        if fits is None:
            expect(bool(reasons), f"{shape.name} is refused without a reason")
            counts["refused"] += 1
        elif match(fast, shape.requirement(fixture))[0] is None:
            counts["left out"] += 1  # its kernel would be compiled first
        else:
            try:
                with fixture.active():
                    shape.run(under_test, fixture)
                counts["right"] += 1
            except Exception as error:
                wrong.append(f"{shape.name}: {type(error).__name__}: {error}".splitlines()[0])
        context.note(**counts)
    expect(not wrong, "\n".join([f"{len(wrong)} shapes are wrong:", *wrong[:8]]))
    expect(counts["right"] > 0, "no shape could be run")


def shapes(dtype: str, tiny: bool) -> Iterator[AttentionCheck]:
    """The reported cases 1, 2, 16 and 68 for both phases."""
    heads, pages = (HEADS[:3], PAGES[:2]) if tiny else (HEADS, PAGES)
    phases: tuple[Phase, Phase] = ("prefill", "decode")
    for phase in phases:
        every = [(query, kv, dim) for query, kv in heads for dim in (64, 128)]
        for query, kv, dim in (*every, *DIMS):
            yield _shape(phase, dtype, f"heads={query}/{kv},head_dim={dim}", kv, query // kv, dim)
        window = _shape(phase, dtype, "window=8", 2, 2, 64)
        rows = ((40, 40), (3, 40)) if phase == "prefill" else ((1, 40), (1, 9))
        yield replace(window, rows=rows, layers=(LayerFacts(0.125, window=8), LayerFacts(0.125)))
        lengths = tuple((1 if phase == "decode" else min(n, 20), n) for n in LENGTHS)
        for page in pages:
            yield replace(_shape(phase, dtype, f"lengths,page_size={page}", 1, 2, 64), rows=lengths, page_size=page)


def _shape(phase: Phase, dtype: str, name: str, kv_heads: int, ratio: int, dim: int) -> AttentionCheck:
    return AttentionCheck(
        name=f"{phase}/{name}",
        phase=phase,
        dtype=dtype,
        kv_heads=kv_heads,
        gqa_ratio=ratio,
        head_dim=dim,
        rows=ROWS[phase],
        layers=(LayerFacts(float(f"{2 * dim**-0.5:.4g}")),),
    )
