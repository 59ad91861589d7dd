"""Collects the checks for the capability sets of a spec."""

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
    """The checks of every capability set for this device, then values just outside each that no other set claims.

    The first check of each set is repeated as a :class:`LifetimeCheck`. Names are unique: with several sets they begin
    with the number of the set, and of equal checks the first is kept.
    """
    capability_sets = under_test.capability_sets(fixture.facts)
    found: dict[str, Check] = {}
    for number, caps in enumerate(capability_sets):
        prefix = f"caps{number}/" if len(capability_sets) > 1 else ""
        own = [replace(check, name=prefix + check.name) for check in inside(caps)]
        own += [LifetimeCheck(name=f"{prefix}lifetime", of=check) for check in own[:1]]
        for check in own:
            found.setdefault(check.name, check)
    for caps in capability_sets:
        others = [other for other in capability_sets if other is not caps]
        for check in beyond(caps):
            required = check.requirement(fixture)
            if required is None or not under_test.claims(required, others):
                found.setdefault(check.name, check)
    return list(found.values())
