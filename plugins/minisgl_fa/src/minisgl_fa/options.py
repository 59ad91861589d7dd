"""Options of the attention backend ``fa``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["FlashAttentionOptions"]


class FlashAttentionOptions(BaseModel):
    """``[backends.options."attention:fa"]``; the defaults leave every choice to the library."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefill_num_splits: int = Field(default=0, ge=0, le=128)
    """Parts that the keys of one prefill row are cut into; 0 = the library's heuristic."""
    decode_num_splits: int = Field(default=0, ge=0, le=128)
    """The same for decode. In a graph the heuristic sees the longest length that the graph may meet."""
    pack_gqa: bool | None = None
    """Pack the query heads of one kv head into a tile (FlashAttention 3 and 4); None = the library's heuristic."""
    schedule_once: bool = True
    """FlashAttention 3: compute the tile schedule once per step instead of once per layer."""
    unpaged_prefill: bool = True
    """FlashAttention 3: where no row of a prefill pass has a cached prefix, read the new keys and values directly, not
    from the pool.
    """
