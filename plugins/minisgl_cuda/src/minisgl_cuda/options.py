"""Options of this plugin's backends: ``[backends.options."attention:cuda_decode"]``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["DecodeOptions"]


class DecodeOptions(BaseModel):
    """How the decode kernel cuts its work and joins the parts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    splits: Literal[1, 2, 4, 8, 16, 32, 64] | None = None
    """Parts that each row's keys are cut into; None = by batch size."""
    block_tokens: Literal[16, 32, 64, 128] | None = None
    """Keys per inner step; None = 64, or as many as the device's shared memory holds."""
    programs: int = Field(default=264, ge=1)
    """How many programs to aim for when choosing the parts: a few per multiprocessor."""
    warps: Literal[1, 2, 4, 8] = 4
    """Warps per program."""
    stages: Literal[1, 2, 3, 4] = 3
    """Steps whose keys are on their way at once; 1 = none is asked for before the one before it is done."""
    launches: Literal[1, 2] | None = None
    """Kernels per layer: 1 = the program that ends last joins a row's parts, 2 = a second kernel does; None = by how
    much there is to join."""
    dependent_launch: bool = False
    """Let the kernel be set up while the one before it still runs (programmatic dependent launch). Needs compute
    capability 9.0 and a Triton that has it."""
