"""What both backends may be configured with."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["GrammarOptions"]


class GrammarOptions(BaseModel):
    """``[backends.options."grammar:NAME"]``"""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_whitespace: int = Field(
        default=16,
        ge=1,
        description="most white space between two parts of a JSON text; a model may repeat it for ever",
    )
