"""Timing of calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .device_fixture import DeviceFixture

__all__ = ["Timer", "median_seconds"]

Timer = Callable[[Callable[[], object], "DeviceFixture"], float]
"""Measures the seconds of one call on a device."""


def median_seconds(
    call: Callable[[], object], fixture: DeviceFixture, *, repeats: int = 20, least: float = 2e-4
) -> float:
    """The median of ``repeats`` measurements after a warm-up.

    Each measures enough queued calls to last ``least`` seconds, so that neither the clock nor a single launch
    dominates.
    """

    def run(count: int) -> float:
        fixture.platform.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            call()
        fixture.platform.synchronize()
        return (time.perf_counter() - began) / count

    run(1)
    count = max(1, int(least / max(run(1), 1e-9)))
    return statistics.median(run(count) for _ in range(repeats))
