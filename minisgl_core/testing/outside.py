"""Checks outside the declared caps: resolving must refuse them, and a throw-away process tries what happens anyway."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minisgl_core.registry import DeviceFacts
from minisgl_core.registry.matching import match
from minisgl_core.registry.probe import ProbeCrash, ProbeProcess

from .compare import Mismatch, expect

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest
    from .check import Check
    from .device_fixture import DeviceFixture

__all__ = ["Outsider", "check_refused", "run_here"]


def check_refused(under_test: BackendUnderTest, check: Check, fixture: DeviceFixture) -> None:
    """Resolving refuses the check, with reasons that say what was wanted and what is supported."""
    need = check.need(fixture)
    if need is None:
        raise Mismatch("this check has nothing that resolving could ask about")
    box, reasons = match(under_test.spec, need)
    expect(box is None, "resolving accepts it although no box of the caps declares it")
    expect(bool(reasons), "resolving refuses it without a reason")
    for reason in reasons:
        complete = bool(reason.code and reason.field and reason.wanted and reason.supported)
        expect(complete, f"the reason {reason!r} lacks a part")


class Outsider:
    """Runs checks in a process that may crash or hang; a new one is started after it did."""

    def __init__(self, timeout_s: float) -> None:
        self._process = ProbeProcess(timeout_s)

    def run(self, under_test: BackendUnderTest, check: Check, device: DeviceFacts) -> str:
        """What went wrong; empty if the backend was right where it does not claim to be."""
        packed = base64.b64encode(pickle.dumps((under_test, check, device))).decode()
        try:
            answer = self._process.ask({"probe": f"{__name__}:run_here", "with": {"packed": packed}})
        except ProbeCrash as crash:
            return f"it {crash}"
        if answer["ok"]:
            return ""
        return str(answer.get("error") or answer.get("reason"))

    def close(self) -> None:
        self._process.__exit__(None, None, None)


def run_here(request: Mapping[str, Any]) -> None:
    """The child's part: run one packed check; raises what it raises."""
    from .device_fixture import DeviceFixture

    under_test, check, device = pickle.loads(base64.b64decode(request["packed"]))
    check.conform(under_test, DeviceFixture(device))
