"""Repeated construction, use and closing of backends must not leak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .check import Check, Result
from .compare import Mismatch
from .leftovers import descriptors

if TYPE_CHECKING:
    from minisgl_core.registry.query import Requirement

    from .backend_under_test import BackendUnderTest
    from .device_fixture import DeviceFixture

__all__ = ["LifetimeCheck"]

WARM_UP: Final = 3
"""Instances after which libraries have loaded what they keep for the process."""
LIVES: Final = 6
LIFE_BYTES: Final = 64 << 10
"""Accepted growth per instance; caches of Python and torch grow less."""


@dataclass(frozen=True, kw_only=True, repr=False)
class LifetimeCheck(Check):
    """Repeats the check ``of`` in one process: memory and file descriptors must not grow with each instance."""

    of: Check

    def needed_imports(self) -> list[str]:
        return [f"from minisgl_core.testing import {type(self.of).__name__}", *self.of.needed_imports()]

    def requirement(self, fixture: DeviceFixture) -> Requirement | None:
        return self.of.requirement(fixture)

    def run(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> Result:
        for _ in range(WARM_UP):
            self.of.run(under_test, fixture)
        opened, in_use = descriptors(), fixture.bytes_in_use()
        for _ in range(LIVES):
            self.of.run(under_test, fixture)
        now, grown = descriptors(), fixture.bytes_in_use() - in_use
        if len(now) >= len(opened) + LIVES:
            left = sorted({target for number, target in now.items() if number not in opened})
            raise Mismatch(
                f"{len(now) - len(opened)} file descriptors are left open by {LIVES} backends, each closed: "
                f"{', '.join(left[:3])}"
            )
        if grown > LIVES * LIFE_BYTES:
            raise Mismatch(f"{grown} bytes are left in use by {LIVES} backends, each closed")
        return Result()
