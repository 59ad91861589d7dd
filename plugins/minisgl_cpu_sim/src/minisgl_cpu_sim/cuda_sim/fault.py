"""Faults of simulated kernels, as readable text."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

__all__ = ["FaultKind", "Index", "SimulatedFault", "Threads", "source_line"]

Index = tuple[int, int, int]

FaultKind = Literal["out-of-bounds", "misaligned", "race", "uninitialised", "divergence", "stuck", "shared-memory"]

KINDS: Final[tuple[FaultKind, ...]] = (
    "out-of-bounds",
    "misaligned",
    "race",
    "uninitialised",
    "divergence",
    "stuck",
    "shared-memory",
)
"""Kinds of faults, numbered from 1 as in the simulator."""
ACCESSES: Final = ("read", "write", "atomic")


@dataclass(frozen=True, slots=True)
class Threads:
    """A thread of the grid."""

    block: Index
    thread: Index

    def __str__(self) -> str:
        return f"block {self.block}, thread {self.thread}"


class SimulatedFault(Exception):
    """The first fault of a launch. Buffers up to 64 MiB are restored."""

    def __init__(
        self,
        kind: FaultKind,
        kernel: str,
        where: Threads,
        *,
        access: str = "",
        size: int = 0,
        buffer: str = "",
        offset: int = 0,
        extent: int = 0,
        other: Threads | None = None,
        source: str = "",
        detail: str = "",
    ) -> None:
        self.kind, self.kernel, self.where = kind, kernel, where
        self.access, self.size = access, size
        """``read``, ``write`` or ``atomic`` with its size in bytes; empty for barriers."""
        self.buffer, self.offset = buffer, offset
        """The argument or shared array that was accessed, or the nearest one, and the byte offset from
        its beginning.
        """
        self.extent = extent
        """Bytes from the beginning to the end of that argument."""
        self.other = other
        """The other access of a race."""
        self.source = source
        """``file:line``, where binutils are installed."""
        self.detail = detail
        super().__init__(str(self))

    def __str__(self) -> str:
        return f"{self._what()}; {self.kernel}, {self.where}" + (f", {self.source}" if self.source else "")

    def _what(self) -> str:
        touch = f"{self.access} of {self.size} bytes"
        place = f"byte {self.offset} of `{self.buffer}`"
        match self.kind:
            case "out-of-bounds":
                return f"{touch} out of bounds: {self._beyond()}"
            case "misaligned":
                return f"misaligned {touch} at {place}"
            case "race":
                return f"race: {touch} at {place} is not ordered with an access of {self.other}"
            case "uninitialised":
                return f"{touch} at {place}, which has not been written since the block began"
            case "divergence":
                return f"barrier that not all threads reach together: {self.detail}"
            case "stuck":
                return f"no end in sight: {self.detail}"
            case "shared-memory":
                return f"too much shared memory: {self.detail}"

    def _beyond(self) -> str:
        if not self.buffer:
            return "no buffer was given"
        if self.offset < 0:
            return f"{-self.offset} bytes before `{self.buffer}`"
        if self.extent and self.offset >= self.extent:
            return f"{self.offset - self.extent} bytes past the end of `{self.buffer}` ({self.extent} bytes)"
        return f"byte {self.offset} of `{self.buffer}`, across its end or in a gap between its rows"


def source_line(library: Path, pc: int, skip: Path) -> str:
    """``file:line`` of the code at ``pc``, through inlined helpers from the folder ``skip``; empty if unknown."""
    tool = shutil.which("addr2line")
    if tool is None or pc <= 0:
        return ""
    # A return address is that of the next instruction.
    command = [tool, "-i", "-e", str(library), hex(pc - 1)]
    frames = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    for frame in frames:
        name, _, line = frame.partition(" ")[0].rpartition(":")
        if name and not name.startswith((str(skip), "?")):
            return f"{Path(name).name}:{line}"
    return ""
