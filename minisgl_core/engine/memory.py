"""How many pages the KV pool gets."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from minisgl_core.errors import EngineError
from minisgl_core.kvcache.pool import PagedKVPool

if TYPE_CHECKING:
    from minisgl_core.core import Context

    from .config import EngineConfig

__all__ = ["check_context", "count_pages"]

logger = logging.getLogger(__name__)

CPU_SHARE = 0.5
"""A CPU's memory belongs to other programs too."""


def check_context(config: EngineConfig, ctx: Context) -> None:
    """Before anything is allocated: warns of a context beyond the model's own, refuses one beyond the memory."""
    trained = ctx.config.max_position_embeddings
    if ctx.max_seq_len > trained:
        logger.warning("max_seq_len_override %d is beyond the %d tokens the model knows", ctx.max_seq_len, trained)
    tables = ctx.max_seq_len * (4 * ctx.config.rope.rotary_dim + 8 * (config.max_running_req + 1))
    _check_fits(ctx, "max_seq_len_override", ctx.max_seq_len, tables, "page table and rotary table")


def _check_fits(ctx: Context, setting: str, value: int, needed: int, what: str) -> None:
    present = ctx.platform.total_bytes()
    if needed > present:
        raise EngineError(
            f"`{setting}` {value} needs {needed / 1e9:.1f} GB for the {what}, the device has {present / 1e9:.1f} GB",
            field=setting,
            value=value,
            remedy="give a smaller number",
        )


def count_pages(config: EngineConfig, ctx: Context, page_size: int, kv_heads: int, kv_dtype: torch.dtype) -> int:
    """Pages of the pool: what was asked for, else what fits, never more than all rows at full length could use.

    Every rank gets the same number, the smallest that any of them can hold. Raises :class:`EngineError` if not even one
    sequence of two tokens fits.
    """
    c = ctx.config
    page_bytes = PagedKVPool.bytes_per_page(c.num_layers, page_size, kv_heads, c.head_dim, kv_dtype)
    if config.num_page_override is not None:
        _check_fits(
            ctx, "num_page_override", config.num_page_override, (config.num_page_override + 1) * page_bytes, "KV pool"
        )
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
