"""Messages between rank 0 and the other ranks, pickled, over one connection per rank.

Rank 0 sends one :class:`Start`, then for each step the tuple of that step's messages. Closing the connection ends the
rank. A rank answers :class:`Imported`, then :class:`Ready`; or, at any time, :class:`Failed` as its exit report.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from minisgl_core.engine import EngineConfig
from minisgl_core.errors import MinisglError

__all__ = ["Failed", "Imported", "Ready", "Start"]


@dataclass(frozen=True, slots=True)
class Start:
    """All that a rank needs to know."""

    config: EngineConfig
    eos_token_ids: frozenset[int]
    """The tokenizer's: only rank 0 loads it."""
    switches: dict[str, Any]
    """``ENV`` of rank 0: values that the program has set are not in the environment."""
    num_threads: int
    """CPU threads that this rank may use."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The model's config and every backend of the plan can be loaded: the rank is about to connect."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank's engine is ready."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Exit report: why the rank is about to end."""

    text: str
    """One line."""
    details: str
    """The traceback."""

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        text = str(error) if isinstance(error, MinisglError) else f"{type(error).__name__}: {error}"
        return cls(text, "".join(traceback.format_exception(error)))
