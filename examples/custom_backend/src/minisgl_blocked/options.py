"""What `[backends.options."attention:blocked"]` may hold."""

from pydantic import BaseModel, ConfigDict, Field


class BlockedOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    query_block: int = Field(default=256, ge=1, description="queries of one prompt per block")
