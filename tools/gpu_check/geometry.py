"""Shapes that users have met with holes in kernels, on each attention backend: right, or refused at the start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from minisgl_core.installation import Installed, check_requires
from minisgl_core.plugin_api import LayerFacts, Phase
from minisgl_core.registry import Candidate, DeviceFacts, Registry
from minisgl_core.registry.matching import match
from minisgl_core.testing import AttentionCheck, BackendUnderTest, DeviceFixture

from .checks import Check, Here, Skipped, expect
from .conformance import backends_here, label_of, needs_of, prebuilt

__all__ = ["checks", "shapes"]

HEADS: Final = ((9, 3), (15, 5), (14, 2), (12, 2), (40, 8), (24, 4), (28, 4), (64, 4), (8, 1), (7, 7))
DIMS: Final = ((32, 32, 80), (32, 32, 96), (8, 1, 256), (3, 3, 80), (16, 8, 128))
LENGTHS: Final = (1, 2, 15, 16, 17, 4097)
PAGES: Final = (1, 16, 64, 256)
ROWS: Final[Mapping[Phase, tuple[tuple[int, int], ...]]] = {
    "prefill": ((33, 33), (1, 1), (8, 41)),
    "decode": ((1, 33), (1, 1), (1, 41)),
}
COMPILING_S: Final = 1800.0
"""FlashInfer compiles each head dimension that it does not bring along, for minutes."""
PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")


def checks(device: DeviceFacts, registry: Registry) -> list[Check]:
    """One check per attention backend."""
    return [
        Check(
            f"shapes/{label_of(item)}",
            partial(run, item),
            20.0,
            cases=(1, 2, 16, 68),
            limit_s=COMPILING_S if "flashinfer" in needs_of(item) else 0.0,
            needs=needs_of(item),
        )
        for item in backends_here(registry, "attention", device)
    ]


def shapes(phase: Phase, dtype: str, tiny: bool) -> Iterator[AttentionCheck]:
    """The reported cases 1, 2, 16 and 68 for one phase."""
    heads, pages = (HEADS[:3], PAGES[:2]) if tiny else (HEADS, PAGES)
    for query, kv in heads:
        for dim in (64, 128):
            yield _case(phase, dtype, f"heads={query}/{kv},head_dim={dim}", kv, query // kv, dim)
    for query, kv, dim in DIMS:
        yield _case(phase, dtype, f"heads={query}/{kv},head_dim={dim}", kv, query // kv, dim)
    window = _case(phase, dtype, "window=8", 2, 2, 64)
    rows = ((40, 40), (3, 40)) if phase == "prefill" else ((1, 40), (1, 9))
    yield replace(window, rows=rows, layers=(LayerFacts(0.125, window=8), LayerFacts(0.125)))
    lengths = tuple((1 if phase == "decode" else min(n, 20), n) for n in LENGTHS)
    for page in pages:
        yield replace(_case(phase, dtype, f"lengths,page_size={page}", 1, 2, 64), rows=lengths, page_size=page)


def _case(phase: Phase, dtype: str, name: str, kv_heads: int, ratio: int, dim: int) -> AttentionCheck:
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


def run(candidate: Candidate, here: Here) -> dict[str, Any]:
    """Each shape is right, or its backend's caps refuse it with reasons."""
    missing = [str(reason) for reason in check_requires(candidate.spec, Installed())]
    if missing:
        raise Skipped(f"not installed: {'; '.join(missing)}")
    rig = DeviceFixture(here.device)
    subject = BackendUnderTest.of(candidate.key, rig.facts)
    fast = prebuilt(subject.spec, here.may_compile)
    dtype = "bfloat16" if here.kind == "cuda" else "float32"
    counts = {"right": 0, "refused": 0, "left out": 0}
    wrong: list[str] = []
    for phase in PHASES:
        for case in shapes(phase, dtype, here.tiny):
            box, reasons = match(subject.spec, case.requirement(rig))
            if box is None:
                expect(bool(reasons), f"{case.name} is refused without a reason")
                counts["refused"] += 1
            elif match(fast, case.requirement(rig))[0] is None:
                counts["left out"] += 1  # its kernel would be compiled first
            else:
                counts["right"] += _is_right(subject, case, rig, wrong)
            here.note(**counts)
    expect(not wrong, "\n".join([f"{len(wrong)} shapes are wrong:", *wrong[:8]]))
    expect(counts["right"] > 0, "no shape could be run")
    return {}


def _is_right(subject: BackendUnderTest, case: AttentionCheck, rig: DeviceFixture, wrong: list[str]) -> bool:
    try:
        with rig.active():
            case.run(subject, rig)
    except Exception as error:
        wrong.append(f"{case.name}: {type(error).__name__}: {error}".splitlines()[0])
        return False
    return True
