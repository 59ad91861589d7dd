"""Work that may crash, hang or initialise CUDA, done in a throw-away process."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Final

from minisgl_core.registry.probe import ProbeCrash, ProbeProcess

__all__ = ["Ending", "Isolated", "with_signal_names"]

_CHILD: Final = "minisgl_core.doctor.child"
_EXIT: Final = re.compile(r"\(exit code -(\d+)\)")


class Ending(Enum):
    """How a question may end the process that it is asked in."""

    NONE = auto()
    DIED = auto()
    TIMED_OUT = auto()


class Isolated:
    """One process that answers questions; another is started after it died."""

    def __init__(self, timeout_s: float) -> None:
        self._process = ProbeProcess(timeout_s)

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()

    def ask(self, function: str, **given: Any) -> tuple[Any, str, Ending]:
        """(what a function of :mod:`.child` returned, what went wrong, what became of the process)"""
        try:
            answer: Mapping[str, Any] = self._process.ask({"ask": f"{_CHILD}:{function}", "with": given})
        except ProbeCrash as crash:
            return None, with_signal_names(str(crash)), Ending.TIMED_OUT if crash.timed_out else Ending.DIED
        if answer["ok"]:
            return answer["value"], "", Ending.NONE
        return None, str(answer["error"]), Ending.NONE


def with_signal_names(text: str) -> str:
    """``(exit code -11)`` -> ``(SIGSEGV)``"""
    return _EXIT.sub(lambda found: f"({signal.Signals(int(found[1])).name})", text)
