"""Options of the attention backend ``flashinfer``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["FlashInferOptions"]


class FlashInferOptions(BaseModel):
    """``[backends.options."attention:flashinfer"]``"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    use_tensor_cores: bool | None = None
    """Decode with the prefill kernel; None = from 4 query heads per kv head on, and for ratios that only it has."""
    prefill_backend: Literal["auto", "fa2", "fa3"] = "auto"
    """FlashInfer's kernel for prefill; its own choice on Hopper is fa3."""
    workspace_mib: int | None = Field(default=None, ge=16, le=4096)
    """Device memory for partial results; None = as much as the largest split prefill needs, at least 128.
    Graphs of tensor-core decode take memory of their own where their rows need more."""
