"""From a spec's boxes of capabilities to the checks that they call for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from .lifetime import LifetimeCheck

if TYPE_CHECKING:
    from minisgl_core.plugin_api import Caps

    from .backend_under_test import BackendUnderTest
    from .check import Check
    from .device_fixture import DeviceFixture

__all__ = ["collect"]


def collect(
    under_test: BackendUnderTest,
    fixture: DeviceFixture,
    inside: Callable[[Caps], Iterable[Check]],
    beyond: Callable[[Caps], Iterable[Check]],
) -> list[Check]:
    """The checks of every box that speaks of this device, then what lies beyond each and in none of the others.

    Each box's first check is also that of a :class:`LifetimeCheck`. Names are unique: with several boxes they begin
    with the box's number, and of equal checks the first is kept.
    """
    boxes = under_test.boxes(fixture.facts)
    found: dict[str, Check] = {}
    for number, box in enumerate(boxes):
        prefix = f"box{number}/" if len(boxes) > 1 else ""
        own = [replace(check, name=prefix + check.name) for check in inside(box)]
        own += [LifetimeCheck(name=f"{prefix}lifetime", of=check) for check in own[:1]]
        for check in own:
            found.setdefault(check.name, check)
    for box in boxes:
        others = [other for other in boxes if other is not box]
        for check in beyond(box):
            need = check.need(fixture)
            if need is None or not under_test.claims(need, others):
                found.setdefault(check.name, check)
    return list(found.values())
