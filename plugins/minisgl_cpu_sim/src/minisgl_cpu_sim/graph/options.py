"""Options of the graph backend ``emulated``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["EmulatedGraphOptions"]


class EmulatedGraphOptions(BaseModel):
    """How recorded steps are replayed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    strict: bool = False
    """Check every replay against the step itself and the host's records; several times slower."""
