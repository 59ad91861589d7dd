"""Work that may crash, hang or initialise CUDA, done in a throw-away process."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final

from minisgl_core.sandbox import Sandbox, SandboxError

__all__ = ["Ending", "Isolated", "with_signal_names"]

_EXIT: Final = re.compile(r"\(exit code -(\d+)\)")


class Ending(Enum):
    """How a call may end the process that it is made in."""

    NONE = auto()
    DIED = auto()
    TIMED_OUT = auto()


class Isolated(Sandbox):
    """One process that answers calls; another is started after it died."""

    def ask(self, function: Callable[..., Any], **given: Any) -> tuple[Any, str, Ending]:
        """(what a function returned for a mapping of these, what went wrong, what became of the process)"""
        try:
            answer = self.call(f"{function.__module__}:{function.__qualname__}", given)
        except SandboxError as error:
            return None, with_signal_names(str(error)), Ending.TIMED_OUT if error.timed_out else Ending.DIED
        if answer["ok"]:
            return answer["value"], "", Ending.NONE
        return None, str(answer["error"]), Ending.NONE


def with_signal_names(text: str) -> str:
    """``(exit code -11)`` -> ``(SIGSEGV)``"""
    return _EXIT.sub(lambda found: f"({signal.Signals(int(found[1])).name})", text)
