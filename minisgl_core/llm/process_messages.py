"""Messages between the processes of one engine, pickled.

The front process sends the engine's process one :class:`StartEngine`, then an item (see
:mod:`~minisgl_core.llm.engine_loop`) for each call. It answers :class:`Ready` with the facts, then a :class:`Step` for
each step and whenever it becomes idle, and reports a step that lasts with :class:`RunningStep`.

Rank 0 sends each other rank one :class:`StartRank`, then for each step the tuple of that step's messages. A rank
answers :class:`Imported`, then :class:`Ready`.

Closing the connection ends the child. Each child may at any time send :class:`Failed`: its exit report, or from an
engine's process the error of a step.
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any, NamedTuple

from minisgl_core.engine import EngineConfig
from minisgl_core.env import ENV
from minisgl_core.errors import EngineError, MinisglError
from minisgl_core.registry import Plan
from minisgl_core.scheduler import Limits, PromptOut, SchedulerStats, TokenOut, TokenRun

__all__ = [
    "EngineFacts",
    "Failed",
    "Imported",
    "Ready",
    "RunningStep",
    "StartEngine",
    "StartRank",
    "Step",
    "apply_switches",
    "read_switches",
]


class EngineFacts(NamedTuple):
    """What is constant for the life of an engine."""

    plan: Plan
    config: EngineConfig
    """Rank 0's."""
    limits: Limits


@dataclass(frozen=True, slots=True)
class StartEngine:
    """All that the engine's process needs to know."""

    config: EngineConfig
    tp_size: int
    eos_token_ids: frozenset[int]
    """The tokenizer's, which only the front process loads."""
    switches: dict[str, Any]
    """``ENV`` of the front process: see :func:`read_switches`."""


@dataclass(frozen=True, slots=True)
class StartRank:
    """All that a rank needs to know."""

    config: EngineConfig
    eos_token_ids: frozenset[int]
    switches: dict[str, Any]
    num_threads: int
    """CPU threads that this rank may use."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The model's config and every backend of the plan can be loaded: the rank is about to connect."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is ready. ``facts`` and ``stats``: from an engine's process only."""

    facts: EngineFacts | None = None
    stats: SchedulerStats | None = None


class Step(NamedTuple):
    """The output of one step of an engine's process."""

    parts: list[TokenOut | TokenRun | PromptOut]
    stats: SchedulerStats
    processed: list[int]
    """Calls whose messages were applied before this step."""
    idle: bool
    """The engine has nothing left to do."""


class RunningStep(NamedTuple):
    """A step that has not ended yet, reported once per second from its first second on."""

    number: int
    seconds: float
    """Since it began."""
    running: int
    """Requests in the batch."""
    waiting: int
    """Requests in the queue."""
    stack: str
    """Where the engine's thread is."""

    def __str__(self) -> str:
        counts = f"{self.running} requests run and {self.waiting} wait"
        return f"step {self.number} of the engine has not ended for {self.seconds:.0f} s; {counts}"


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a process is about to end, or why its steps fail."""

    text: str
    """One line."""
    details: str
    """The traceback."""
    error: BaseException
    """The exception, without its traceback; an :class:`EngineError` for one that cannot be pickled."""

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        text = str(error) if isinstance(error, MinisglError) else f"{type(error).__name__}: {error}"
        return cls(text, "".join(traceback.format_exception(error)), _portable(error))


def _portable(error: BaseException) -> BaseException:
    try:
        copied = pickle.loads(pickle.dumps(error))
        if type(copied) is type(error) and str(copied) == str(error):
            return error
    except Exception:
        pass
    return EngineError(f"{type(error).__name__}: {error}")


def read_switches() -> dict[str, Any]:
    """The values of ``ENV`` for a child: those that the program has set are not in the environment."""
    return {switch.name: switch.value for switch in ENV.all()}


def apply_switches(switches: dict[str, Any]) -> None:
    """In a child: set ``ENV`` to them."""
    for switch in ENV.all():
        switch.value = switches[switch.name]
