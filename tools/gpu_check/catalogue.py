"""Every check, in the order in which they are worth most when time runs out."""

from __future__ import annotations

from minisgl_core.registry import DeviceFacts, discover

from . import cases, conformance, crowd, folders, geometry, hygiene, machine, parity, sanitizer
from .checks import Check

__all__ = ["checks"]


def checks(device: DeviceFacts, quick: bool) -> list[Check]:
    """The checks for this device; with ``quick`` those that need no long compilation. Names are unique."""
    registry = discover()
    listed = [
        *machine.checks(device),
        *parity.checks(device, registry, quick),
        *crowd.checks(device, registry, quick),
        *cases.checks(device),
        *conformance.checks(device, registry, quick),
        *geometry.checks(device, registry),
        *hygiene.checks(device, registry),
        *folders.checks(device, quick),
        *sanitizer.checks(device),
    ]
    return [check for check in listed if check.quick or not quick]
