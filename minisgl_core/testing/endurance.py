"""Many calls in a row: each is correct, equal calls give equal results, and nothing is cached per call or length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from .compare import Mismatch, close, same

if TYPE_CHECKING:
    from .device_fixture import DeviceFixture

__all__ = ["STEPS", "Step", "check_endurance", "sizes_in_turn"]

STEPS: Final = 260
"""More than eight bits can count, and more than any warm-up."""
WARM_UP: Final = 100
KEPT_BYTES: Final = {"cpu": 512}
"""Accepted growth per step, averaged over each half of the steps after the warm-up. Allocators and Python grow less."""
KEPT_BYTES_BY_DRIVERS: Final = 4096
"""The same on devices other than the CPU. On an H200 the driver and torch's allocator grew by 640 to 1,330 bytes of
host memory per step of plain torch operations.
"""
REPEATABLE: Final = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}
"""Largest difference between two results of the same call, relative to 1 + |result|: sums in another order, and one
rounding, which is 2**-10 in float16 and 2**-7 in bfloat16.
"""

Results = Sequence[torch.Tensor]


class Step(NamedTuple):
    """``fresh(n)`` makes and judges call n, which differs each time, and returns its error. ``repeated()`` makes the
    same call each time (None: there is none).
    """

    fresh: Callable[[int], float]
    repeated: Callable[[], Results] | None


def sizes_in_turn(fixture: DeviceFixture) -> list[int]:
    """1..STEPS in random order: a cache per power of two is soon complete, a cache per size keeps growing."""
    return (torch.randperm(STEPS, generator=fixture.generator(7)) + 1).tolist()


def check_endurance(fixture: DeviceFixture, step: Step) -> tuple[float, str]:
    """(the worst error, a note about something that is not a fault)"""
    # Clones: a backend that reuses its output tensors must not change what later results are compared with.
    first = None if step.repeated is None else [result.clone() for result in step.repeated()]
    worst, spread, marks = 0.0, 0.0, []
    for number in range(STEPS):
        if number in (WARM_UP, (WARM_UP + STEPS) // 2):
            marks.append(fixture.bytes_in_use())
        try:
            worst = max(worst, step.fresh(number))
        except Mismatch as found:
            raise Mismatch(f"call {number} of {STEPS}: {found}") from None
        if first is not None and step.repeated is not None:
            spread = max(spread, _spread(step.repeated(), first, number))
    _check_kept([*marks, fixture.bytes_in_use()], KEPT_BYTES.get(fixture.device.type, KEPT_BYTES_BY_DRIVERS))
    note = f"results of equal calls differ by up to {spread:.3g}: sums are taken in changing orders" if spread else ""
    return worst, note


def _spread(results: Results, first: Results, number: int) -> float:
    """The difference between the first result of a call and its repetitions; 0 if they are equal bit for bit."""
    worst, what = 0.0, f"the same call, run again after {number + 1} others,"
    for result, before in zip(results, first, strict=True):
        if not result.is_floating_point():
            same(result, before, what)
        elif not torch.equal(result, before):
            limit = REPEATABLE[str(before.dtype).removeprefix("torch.")]
            worst = max(worst, close(result, before.to(torch.float64), what, tolerance=limit))
    return worst


def _check_kept(marks: Sequence[int], allowed: int) -> None:
    """Raise if memory grew in both halves of the steps."""
    # The smaller growth of the two halves: a cache that fills up grows in one of them only.
    steps = (STEPS - WARM_UP) // 2
    kept = min(after - before for before, after in pairwise(marks)) / steps
    if kept > allowed:
        raise Mismatch(f"each call, or each new length, leaves {kept:.0f} bytes in use")
