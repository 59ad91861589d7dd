"""Options of this plugin's backends, such as ``[backends.options."attention:cuda_decode"]``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["DecodeOptions", "SkinnyOptions"]


class DecodeOptions(BaseModel):
    """How the decode kernel cuts its work and joins the parts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    splits: Literal[1, 2, 4, 8, 16, 32, 64] | None = None
    """Parts that each row's keys are cut into; None = by batch size."""
    block_tokens: Literal[16, 32, 64, 128] | None = None
    """Keys per inner step; None = 64, or as many as the device's shared memory holds."""
    programs: int = Field(default=528, ge=1)
    """How many programs to aim for when choosing the parts: a few per multiprocessor."""
    warps: Literal[1, 2, 4, 8] = 4
    """Warps per program."""
    stages: Literal[1, 2, 3, 4] = 3
    """Steps whose keys are on their way at once; 1 = none is asked for before the one before it is done."""
    launches: Literal[1, 2] = 2
    """Kernels per layer where keys are cut: 1 = the program that ends last joins a row's parts, 2 = a second kernel."""
    dependent_launch: bool | None = None
    """Let the kernel be set up while the one before it still runs (programmatic dependent launch). Needs compute
    capability 9.0 and a Triton that has it; None = where both are there."""


class SkinnyOptions(BaseModel):
    """How the products of few rows are launched."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dependent_launch: bool | None = None
    """Let a product be set up, and fetch its weight, while the kernel before it still computes its input. Needs compute
    capability 9.0 and a Triton that has programmatic dependent launches; None = where both are there."""
    fuse: list[Literal["add_rms_norm", "act_and_mul"]] = ["add_rms_norm", "act_and_mul"]
    """What products may take in, where it was measured faster: the add and norm before them, the activation behind."""
