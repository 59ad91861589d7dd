"""How many pages the KV pool gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl_core.errors import EngineError
from minisgl_core.kvcache.pool import PagedKVPool

if TYPE_CHECKING:
    from minisgl_core.core import Context

    from .config import EngineConfig

__all__ = ["count_pages"]

CPU_SHARE = 0.5
"""A CPU's memory belongs to other programs too."""


def count_pages(config: EngineConfig, ctx: Context, page_size: int, kv_heads: int, kv_dtype: torch.dtype) -> int:
    """Pages of the pool: what was asked for, else what fits, never more than all rows at full length could use.

    Every rank gets the same number, the smallest that any of them can hold. Raises :class:`EngineError` if not even one
    sequence of two tokens fits.
    """
    c = ctx.config
    page_bytes = PagedKVPool.bytes_per_page(c.num_layers, page_size, kv_heads, c.head_dim, kv_dtype)
    if config.num_page_override is not None:
        return config.num_page_override
    useful = config.max_running_req * -(-ctx.max_seq_len // page_size)
    budget = ctx.platform.free_bytes() * config.memory_ratio
    if ctx.device.type == "cpu":
        budget *= CPU_SHARE / ctx.tp.size
    mine = min(useful, int(budget // page_bytes))
    counts = ctx.comm.all_gather(torch.tensor([[mine]], dtype=torch.int64, device=ctx.device))
    pages = int(counts.min())
    if pages * page_size < 2:
        raise EngineError(
            f"the KV pool would hold {pages} pages of {page_bytes} bytes within {int(budget)} free bytes",
            field="memory_ratio",
            value=config.memory_ratio,
            remedy="free memory, raise `memory_ratio` or choose a smaller model",
        )
    return pages
