"""How fast a backend is, against what this machine can do: a copy for what moves bytes, a product for what multiplies.

Both limits are measured here, so that a share of 90 % means the same on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from minisgl_core.plugin_api import LayerFacts, Role

from .attention_bench import AttentionBench, Geometry
from .attention_cases import DTYPES, GQA_RATIOS, HEAD_DIMS, PAGE_SIZES
from .rig import dtype_named
from .subject import names_of
from .values import usual

if TYPE_CHECKING:
    from minisgl_core.plugin_api import Caps

    from .rig import Rig
    from .subject import Subject

__all__ = ["Speed", "Workload", "measure", "seconds_of"]

Kind = Literal["GB/s", "TFLOP/s"]


@dataclass(frozen=True, slots=True)
class Workload:
    """A call to time. ``amount``: bytes that it must move, or floating-point operations that it must do."""

    label: str
    kind: Kind
    amount: float
    dtype: str
    call: Callable[[], object]
    close: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Speed:
    """What a workload achieved, and the limit of this machine for its kind."""

    label: str
    kind: Kind
    achieved: float
    limit: float
    microseconds: float

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "label": self.label,
            "unit": self.kind,
            "achieved": round(self.achieved, 3),
            "limit": round(self.limit, 3),
            "share": round(self.achieved / self.limit, 4),
            "microseconds": round(self.microseconds, 2),
        }


def measure(subject: Subject, rig: Rig, quick: bool) -> list[Speed]:
    """Time the role's workloads, one after the other; empty for roles that have none."""
    make = WORKLOADS.get(subject.spec.role)
    boxes = subject.boxes(rig.facts)
    if make is None or not boxes:
        return []
    limits: dict[tuple[Kind, str], float] = {}
    speeds = []
    budget = 0.05 if quick else 0.5
    with rig.active():
        for work in make(subject, rig, boxes[0], quick):
            seconds = seconds_of(work.call, rig, budget)
            key = (work.kind, work.dtype)
            if key not in limits:
                limits[key] = _copy_limit(rig, budget) if work.kind == "GB/s" else _product_limit(rig, *key[1:], budget)
            unit = 1e9 if work.kind == "GB/s" else 1e12
            speeds.append(Speed(work.label, work.kind, work.amount / seconds / unit, limits[key], seconds * 1e6))
            work.close()
    return speeds


def seconds_of(call: Callable[[], object], rig: Rig, budget: float) -> float:
    """Time of one call in a queue of them: the best of three runs that last about ``budget`` together."""

    def run(count: int) -> float:
        rig.platform.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            call()
        rig.platform.synchronize()
        return (time.perf_counter() - began) / count

    run(2)
    count = max(1, int(budget / 3 / max(run(1), 1e-7)))
    return min(run(count) for _ in range(3))


def _copy_limit(rig: Rig, budget: float) -> float:
    size = 2**30 if rig.device.type == "cuda" else 2**26
    source, target = (torch.zeros(size, dtype=torch.uint8, device=rig.device) for _ in range(2))
    return 2 * size / seconds_of(lambda: target.copy_(source), rig, budget) / 1e9


def _product_limit(rig: Rig, dtype: str, budget: float) -> float:
    size = 8192 if rig.device.type == "cuda" else 512
    a, b = (torch.ones(size, size, dtype=dtype_named(dtype), device=rig.device) for _ in range(2))
    return 2.0 * size**3 / seconds_of(lambda: a @ b, rig, budget) / 1e12


def attention_work(subject: Subject, rig: Rig, box: Caps, quick: bool) -> Iterator[Workload]:
    """Decode must read every key and value once; prefill must do 4 * D operations per pair of positions that see each
    other and head.
    """
    large = rig.device.type == "cuda" and not quick
    dtype = next((name for name in ("bfloat16", "float16") if name in names_of(box.dtypes, DTYPES)), "float32")
    dtype = dtype if rig.device.type == "cuda" else names_of(box.dtypes, DTYPES)[0]
    dim, ratio = usual(box.head_dims, 128, HEAD_DIMS) or 128, usual(box.gqa_ratios, 4, GQA_RATIOS) or 4
    page, kv_heads = usual(box.page_sizes, 16, PAGE_SIZES) or 16, 8 if large else 2
    layers = (LayerFacts(dim**-0.5),)
    geometry = Geometry(dtype, dtype, page, kv_heads, kv_heads * ratio, dim, layers, box.finite_tail)
    for phase in box.phases:
        count, length = (64, 4096) if large else (4, 512)
        if phase == "prefill":
            count = 4 if large else 1
        lens = [(1 if phase == "decode" else length, length)] * count
        call, close = _attention_call(subject, rig, geometry, phase, lens)
        if phase == "decode":
            amount = 2.0 * count * length * kv_heads * dim * dtype_named(dtype).itemsize
            yield Workload(f"decode, {count} rows of {length}", "GB/s", amount, dtype, call, close)
        else:
            amount = 4.0 * dim * kv_heads * ratio * count * length * (length + 1) / 2
            yield Workload(f"prefill, {count} rows of {length}", "TFLOP/s", amount, dtype, call, close)


def _attention_call(
    subject: Subject, rig: Rig, geometry: Geometry, phase: str, lens: Sequence[tuple[int, int]]
) -> tuple[Callable[[], object], Callable[[], object]]:
    bench = AttentionBench(rig, geometry, len(lens), max(total for _, total in lens), seed=0)
    bench.fill([total for _, total in lens])
    backend = subject.build(bench.setup(sum(new for new, _ in lens)))
    backend.bind_kv(bench.pool)
    wide = bench.wide(sum(new for new, _ in lens))
    bench.write_inputs(wide, lens, 0)
    batch = bench.eager(phase, lens)
    backend.prepare_metadata(batch)
    backend.update_metadata(batch)
    inputs = bench.views(wide)
    return lambda: backend.forward(*inputs, 0, batch), backend.close


Maker = Callable[["Subject", "Rig", "Caps", bool], Iterator[Workload]]
WORKLOADS: Final[dict[Role, Maker]] = {"attention": attention_work}
