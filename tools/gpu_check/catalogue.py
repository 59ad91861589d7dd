"""Every check, in the order in which they are worth most when time runs out."""

from __future__ import annotations

from minisgl_core.installation import Installed
from minisgl_core.registry import DeviceFacts, discover

from . import cases, conformance, crowd, folders, geometry, hygiene, machine, parity, sanitizer
from .checks import Check

__all__ = ["checks"]


def checks(device: DeviceFacts, quick: bool, elsewhere: bool = False) -> list[Check]:
    """The checks for this device; with ``quick`` those that need no long compilation. Names are unique.

    ``elsewhere``: the device is in another machine, which may have every library.
    """
    registry = discover()
    pairs = list(parity.attention_pairs(device, registry, None if elsewhere else Installed()))
    listed = [
        *machine.checks(device),
        *parity.checks(quick, pairs),
        *crowd.checks(quick, pairs),
        *cases.checks(device),
        *conformance.checks(device, registry, quick),
        *geometry.checks(device, registry),
        *hygiene.checks(pairs),
        *folders.checks(device, quick),
        *sanitizer.checks(),
    ]
    return [check for check in listed if check.quick or not quick]
