"""Options of this plugin's backends, such as ``[backends.options."attention:cuda_decode"]``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["DecodeOptions", "SkinnyOptions"]


class DecodeOptions(BaseModel):
    """How the decode kernel splits its work and joins the parts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    splits: Literal[1, 2, 4, 8, 16, 32, 64] | None = None
    """Parts that each row's keys are cut into; None = by batch size."""
    block_tokens: Literal[16, 32, 64, 128] | None = None
    """Keys per inner step; None = 64, or as many as the device's shared memory holds."""
    programs: int = Field(default=528, ge=1)
    """Number of programs to aim for when choosing the splits: a few per multiprocessor."""
    warps: Literal[1, 2, 4, 8] = 4
    """Warps per program."""
    stages: Literal[1, 2, 3, 4] = 3
    """Inner steps whose keys are loaded at once; 1 = each is loaded after the one before is done."""
    launches: Literal[1, 2] = 2
    """Kernels per layer where keys are cut: 1 = the program that ends last joins a row's parts, 2 = a second kernel."""
    dependent_launch: bool | None = None
    """Set up the kernel while the previous one still runs (programmatic dependent launch). Requires compute capability
    9.0 and a Triton that supports it; None = if both are available.
    """


class SkinnyOptions(BaseModel):
    """How products of few rows are launched."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dependent_launch: bool | None = None
    """Set up a product and load its weight while the previous kernel still computes its input. Requires compute
    capability 9.0 and a Triton with programmatic dependent launches; None = if both are available.
    """
    fuse: list[Literal["add_rms_norm", "act_and_mul"]] = ["add_rms_norm", "act_and_mul"]
    """Operations that products may be fused with, where it was measured to be faster: the add and norm before them, the
    activation behind.
    """
