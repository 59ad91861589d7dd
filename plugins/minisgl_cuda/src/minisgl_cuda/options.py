"""Options of this plugin's backends: ``[backends.options."attention:cuda_decode"]``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["DecodeOptions"]


class DecodeOptions(BaseModel):
    """How the decode kernel cuts its work."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    splits: Literal[1, 2, 4, 8, 16, 32, 64] | None = None
    """Parts that each row's keys are cut into; None = by batch size."""
    block_tokens: Literal[16, 32, 64, 128] = 64
    """Keys per inner step."""
    programs: int = Field(default=264, ge=1)
    """How many programs to aim for when choosing the parts: a few per multiprocessor."""
