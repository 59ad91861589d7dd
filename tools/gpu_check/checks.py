"""What a check is, what it is told, and what becomes of it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from minisgl_core.registry import DeviceFacts

__all__ = ["NO_COMPILATION", "ROOT", "STATUSES", "Check", "Failed", "Here", "Record", "Skipped", "Status", "expect"]

Status = Literal["ok", "failed", "skipped", "unfinished"]
STATUSES: Final[tuple[Status, ...]] = ("ok", "failed", "skipped", "unfinished")
NO_COMPILATION: Final = "FLASHINFER_DISABLE_JIT"
ROOT: Final = Path(__file__).resolve().parents[2]
"""The checkout: its tests and examples are needed, its packages are not imported from there."""


class Failed(Exception):
    """The check found something wrong; its text says what."""


class Skipped(Exception):
    """The check cannot be made here; its text says why."""


def expect(condition: bool, text: str) -> None:
    """Raise :class:`Failed` with ``text`` unless ``condition`` holds."""
    if not condition:
        raise Failed(text)


@dataclass(frozen=True)
class Here:
    """Where a check runs. ``scratch`` is shared by all processes of a run; ``note`` adds figures to the record."""

    device: DeviceFacts
    quick: bool
    scratch: Path
    note: Callable[..., None]

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """The device that engines are made on."""
        return self.device.kind

    @property
    def tiny(self) -> bool:
        """On a CPU the same checks run on the stand-ins, as small as they can be."""
        return self.kind == "cpu"

    @property
    def may_compile(self) -> bool:
        """May kernels be compiled for minutes? Whoever forbids FlashInfer to compile wants none of these."""
        return os.environ.get(NO_COMPILATION) != "1"

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """A folder that ``make`` fills, once for all processes; the others wait for it."""
        folder = self.scratch / name
        self.scratch.mkdir(parents=True, exist_ok=True)
        with (self.scratch / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=self.scratch))
                try:
                    make(draft)
                    draft.rename(folder)
                finally:
                    shutil.rmtree(draft, ignore_errors=True)
        return folder


@dataclass(frozen=True)
class Check:
    """One thing to find out. ``run`` returns figures, or raises: :class:`Skipped`, or anything else if it failed.

    Checks of one ``session`` share a process, in order; an empty one means a process of its own. ``seconds`` is a rough
    cost, by which parts are balanced and limits set. ``cases`` are the numbers of the reported faults that it shows to
    be absent (see tests/cases/README.md). An ``alone`` one has the device to itself, as has its whole session.
    """

    name: str
    run: Callable[[Here], Mapping[str, Any] | None]
    seconds: float
    session: str = ""
    quick: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    """Of the session's process; the same for all checks of a session."""
    cases: tuple[int, ...] = ()
    limit_s: float = 0.0
    """0 = four times the cost, at least three minutes"""
    alone: bool = False
    needs: tuple[str, ...] = ()
    """Modules, programs and hardware, beside a device of the kind that is checked, without which it is skipped."""

    @property
    def limit(self) -> float:
        """Seconds after which it has failed."""
        return self.limit_s or max(180.0, 4 * self.seconds)

    @property
    def process(self) -> str:
        """The name of its session."""
        return self.session or self.name


@dataclass(frozen=True)
class Record:
    """What became of a check. ``error``: the first lines of what went wrong, or why it was not made."""

    name: str
    status: Status
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: tuple[str, ...] = ()
    cases: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "name": self.name,
            "status": self.status,
            "seconds": round(self.seconds, 2),
            "figures": dict(self.figures),
            "error": list(self.error),
            "cases": list(self.cases),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """The inverse of :meth:`to_json`."""
        return cls(**{**data, "error": tuple(data["error"]), "cases": tuple(data["cases"])})
