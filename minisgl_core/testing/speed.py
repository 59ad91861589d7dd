"""The speed of a backend, relative to what this machine can do: a copy for memory-bound work, a product for arithmetic.

Both limits are measured here, so that a share of 90 % means the same on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .device_fixture import dtype_named
from .workloads import WORKLOADS, Kind

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest
    from .device_fixture import DeviceFixture

__all__ = ["Speed", "measure", "seconds_of"]


@dataclass(frozen=True, slots=True)
class Speed:
    """The rate of a workload, and this machine's limit for its kind."""

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


def measure(under_test: BackendUnderTest, fixture: DeviceFixture, quick: bool) -> list[Speed]:
    """Time the role's workloads, one after the other; empty for roles that have none."""
    make = WORKLOADS.get(under_test.spec.role)
    capability_sets = under_test.capability_sets(fixture.facts)
    if make is None or not capability_sets:
        return []
    limits: dict[tuple[Kind, str], float] = {}
    speeds = []
    budget = 0.05 if quick else 0.5
    with fixture.active():
        for work in make(under_test, fixture, capability_sets[0], quick):
            seconds = seconds_of(work.call, fixture, budget)
            key = (work.kind, work.dtype)
            if key not in limits:
                limits[key] = (
                    _copy_limit(fixture, budget) if work.kind == "GB/s" else _product_limit(fixture, *key[1:], budget)
                )
            unit = 1e9 if work.kind == "GB/s" else 1e12
            speeds.append(Speed(work.label, work.kind, work.amount / seconds / unit, limits[key], seconds * 1e6))
            work.close()
    return speeds


def seconds_of(call: Callable[[], object], fixture: DeviceFixture, budget: float) -> float:
    """Time of one call among queued calls: the best of three runs that take about ``budget`` together."""

    def run(count: int) -> float:
        fixture.platform.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            call()
        fixture.platform.synchronize()
        return (time.perf_counter() - began) / count

    run(2)
    count = max(1, int(budget / 3 / max(run(1), 1e-7)))
    return min(run(count) for _ in range(3))


def _copy_limit(fixture: DeviceFixture, budget: float) -> float:
    size = 2**30 if fixture.device.type != "cpu" else 2**26
    source, target = (torch.zeros(size, dtype=torch.uint8, device=fixture.device) for _ in range(2))
    return 2 * size / seconds_of(lambda: target.copy_(source), fixture, budget) / 1e9


def _product_limit(fixture: DeviceFixture, dtype: str, budget: float) -> float:
    size = 8192 if fixture.device.type != "cpu" else 512
    a, b = (torch.ones(size, size, dtype=dtype_named(dtype), device=fixture.device) for _ in range(2))
    return 2.0 * size**3 / seconds_of(lambda: a @ b, fixture, budget) / 1e12
