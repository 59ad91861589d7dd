"""The child process: runs the checks of one session in order and tells the parent of each, a JSON line at a time."""

from __future__ import annotations

import importlib
import json
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minisgl_core.registry import DeviceFacts

from .checks import ROOT, Check, Failed, Here, Record, Skipped

__all__ = ["MAX_LINES", "Order", "run_order"]

MAX_LINES: Final = 12
"""Of an error, in the report."""


@dataclass(frozen=True)
class Order:
    """What a child is told. ``catalogue`` names a function ``(device, quick) -> checks``."""

    device: Mapping[str, Any]
    """Fields of DeviceFacts"""
    quick: bool
    scratch: str
    catalogue: str
    names: Sequence[str]
    fd: int
    """Where to write what happened"""

    def checks(self) -> dict[str, Check]:
        """The whole catalogue, by name."""
        module, _, function = self.catalogue.partition(":")
        listed: list[Check] = getattr(importlib.import_module(module), function)(self.facts, self.quick)
        return {check.name: check for check in listed}

    @property
    def facts(self) -> DeviceFacts:
        """The device."""
        return DeviceFacts(**self.device)


def run_order(text: str) -> int:
    """Run an order (as JSON) until it is done or a check fails: the device may be in any state after that, so the
    parent starts another process for the rest.
    """
    order = Order(**json.loads(text))
    os.set_inheritable(order.fd, False)  # what a check starts must not keep the parent listening
    checks = order.checks()
    for name in order.names:
        check = checks[name]
        _tell(order.fd, {"event": "start", "name": name, "limit": check.limit})
        record = _run(check, order)
        _tell(order.fd, {"event": "done", "record": record.to_json()})
        if record.status == "failed":
            break
    return 0


def _run(check: Check, order: Order) -> Record:
    began, figures = time.perf_counter(), dict[str, Any]()

    def note(**more: Any) -> None:
        figures.update(more)
        _tell(order.fd, {"event": "note", "figures": more})

    def record(status: Any, error: Sequence[str] = ()) -> Record:
        seconds = time.perf_counter() - began
        return Record(check.name, status, seconds, figures, tuple(error[:MAX_LINES]), check.cases)

    try:
        figures |= check.run(Here(order.facts, order.quick, Path(order.scratch), note)) or {}
    except Skipped as skipped:
        return record("skipped", str(skipped).splitlines())
    except Failed as failed:
        return record("failed", str(failed).splitlines())
    except BaseException as error:
        traceback.print_exc()  # whole, to the session's log
        return record("failed", [*f"{type(error).__name__}: {error}".splitlines()[: MAX_LINES - 4], *_places(error)])
    return record("ok")


def _places(error: BaseException) -> list[str]:
    """The innermost calls, the last one last."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return [f"  in {_short(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames]


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "/".join(path.parts[-3:])


def _tell(fd: int, event: Mapping[str, Any]) -> None:
    data = json.dumps(event, default=str).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]
