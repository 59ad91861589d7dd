"""Kinds of devices, and one device as data. Names of kinds occur nowhere else outside builtin/ and data files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["DEVICE_CHOICES", "DEVICE_KINDS", "WORDS", "DeviceFacts", "DeviceKind", "device_kind", "wants_graph"]

WORDS: Final[Mapping[str, Any]] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
"""The words of the fields of :class:`Caps`: where the set is closed, with what people write for them elsewhere."""


class DeviceKind(NamedTuple):
    """What the core has to know of a kind of device. An unlisted kind is an accelerator without these."""

    on_host: bool = False
    """Is its memory the host's, shared by all ranks?"""
    has_capability: bool = False
    """Do its members differ in compute capability (``Caps.sm``)?"""
    captures: bool = False
    """Are graphs captured unless config says otherwise?"""
    aliases: Sequence[str] = ()
    """What people write elsewhere"""


DEVICE_KINDS: Final[Mapping[str, DeviceKind]] = {name: DeviceKind(**facts) for name, facts in WORDS["devices"].items()}
DEVICE_CHOICES: Final = ("auto", *DEVICE_KINDS)
"""The values of the setting ``device``."""


def device_kind(name: str) -> DeviceKind:
    """The facts of a kind of device."""
    return DEVICE_KINDS.get(name, DeviceKind())


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device, as data. ``sm`` is the compute capability times ten (90 = 9.0), None where the kind has none."""

    kind: str
    sm: int | None = None
    name: str = ""
    total_bytes: int = 0
    count: int = 1
    driver: str = ""

    def __str__(self) -> str:
        return f"{self.kind} sm{self.sm}" if self.sm is not None else self.kind

    @property
    def about(self) -> DeviceKind:
        """The facts of its kind."""
        return device_kind(self.kind)


def wants_graph(cuda_graph_max_bs: int | None, device: DeviceFacts) -> bool:
    """Are graphs requested? None means the default of the kind of device."""
    return device.about.captures if cuda_graph_max_bs is None else cuda_graph_max_bs > 0
