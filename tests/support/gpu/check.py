"""What a check is, the context that it runs in, and the record of its result."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from minisgl_core.registry import DeviceFacts

__all__ = ["NO_COMPILATION", "ROOT", "STATUSES", "Check", "Context", "Failed", "Record", "Skipped", "expect"]

Status = Literal["ok", "failed", "skipped", "unfinished"]
STATUSES: Final[tuple[Status, ...]] = ("ok", "failed", "skipped", "unfinished")
NO_COMPILATION: Final = "FLASHINFER_DISABLE_JIT"
ROOT: Final = Path(__file__).resolve().parents[3]
"""The checkout: its tests are needed, its packages are not imported from there."""
Failed = pytest.fail.Exception
Skipped = pytest.skip.Exception


def expect(condition: bool, text: str) -> None:
    """Fail the check with ``text`` unless ``condition`` holds."""
    if not condition:
        raise Failed(text, pytrace=False)


@dataclass(frozen=True)
class Check:
    """A test of ``tests/gpu``: ``test_bf16[fa+fa/moe]`` is the check ``bf16/fa+fa/moe``, ``test_case_27_chunks`` is
    ``case/27-chunks``.

    Its other fields come from ``pytest.mark.check``, where a parameter's marker overrides the test's and the module's.
    Checks of one ``session`` share a process, in order; without one, a check has a process of its own. ``seconds`` is a
    rough cost, which balances parts and sets limits. ``cases`` are the numbers of the reported faults that it shows to
    be absent (see tests/cases/README.md). The whole session of an ``alone`` check runs while nothing else does.
    """

    name: str
    nodeid: str = ""
    seconds: float = 10.0
    session: str = ""
    quick: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    """Of the session's process; equal for all checks of a session"""
    cases: tuple[int, ...] = ()
    limit_s: float = 0.0
    """0 = four times the cost, at least three minutes"""
    alone: bool = False
    needs: tuple[str, ...] = ()
    """Modules, programs and hardware without which it is skipped"""

    @classmethod
    def of(cls, item: pytest.Item) -> Check:
        """From a collected test and its markers."""
        function, _, parameters = item.name.partition("[")
        group = function.removeprefix("test_").replace("case_", "case/").replace("_", "-")
        fields: dict[str, Any] = {}
        for marker in (marker for node in item.listchain() for marker in node.own_markers if marker.name == "check"):
            fields |= marker.kwargs  # from the module to the parameter
        return cls("/".join(filter(None, (group, parameters.removesuffix("]")))), item.nodeid, **fields)

    @property
    def limit(self) -> float:
        """Seconds after which it has failed."""
        return self.limit_s or max(180.0, 4 * self.seconds)

    @property
    def process(self) -> str:
        """The name of its session."""
        return self.session or self.name


@dataclass(frozen=True)
class Context:
    """Where a check runs. All processes of a run share ``scratch``; ``note`` adds figures to the record."""

    device: DeviceFacts
    quick: bool
    scratch: Path
    note: Callable[..., None] = lambda **figures: None
    elsewhere: bool = False
    """The device is in another machine, which may have every library: the checks can only be listed"""

    @property
    def kind(self) -> str:
        """The device that engines are made on."""
        return self.device.kind

    @property
    def tiny(self) -> bool:
        """On a CPU the same checks run on the stand-ins, with the smallest workloads."""
        return self.kind == "cpu"

    @property
    def may_compile(self) -> bool:
        """Whether kernels may be compiled for minutes: not if FlashInfer is forbidden to compile."""
        return os.environ.get(NO_COMPILATION) != "1"

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """A folder that ``make`` fills once for all processes; the others wait for it."""
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
class Record:
    """The result of a check. ``error``: the first lines of what went wrong, or why it was not run."""

    name: str
    status: Status
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: tuple[str, ...] = ()
    cases: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {**asdict(self), "seconds": round(self.seconds, 2), "error": [*self.error], "cases": [*self.cases]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """The inverse of :meth:`to_json`."""
        return cls(**{**data, "error": tuple(data["error"]), "cases": tuple(data["cases"])})
