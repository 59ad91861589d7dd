"""Refusals: by resolving, outside the declared caps, and by a backend itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl_core.plugin_api import CannotRun, Reason
from minisgl_core.registry.matching import match

from .compare import Mismatch, expect

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest
    from .check import Check
    from .device_fixture import DeviceFixture

__all__ = ["check_refused", "refusal_of"]


def check_refused(under_test: BackendUnderTest, check: Check, fixture: DeviceFixture) -> None:
    """Resolving must refuse the check, with reasons that name what was wanted and what is supported."""
    required = check.requirement(fixture)
    if required is None:
        raise Mismatch("this check has nothing that resolving could ask about")
    caps, reasons = match(under_test.spec, required)
    expect(caps is None, "resolving accepts it although no capability set declares it")
    expect(bool(reasons), "resolving refuses it without a reason")
    for reason in reasons:
        complete = bool(reason.code and reason.field and reason.wanted and reason.supported)
        expect(complete, f"the reason {reason!r} lacks a part")


def refusal_of(error: BaseException) -> Reason | None:
    """The reason of a refusal: that of :class:`CannotRun`, as raised or as reported by the construction."""
    for candidate in (error, None if isinstance(error, Mismatch) else error.__cause__):
        if isinstance(candidate, CannotRun):
            return candidate.reason
    return None
