"""How the device's memory is divided: passes and graphs come first, the KV pool gets the rest."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minisgl_core.errors import EngineError
from minisgl_core.kvcache.pool import PagedKVPool
from minisgl_core.plugin_api import MemoryGauge

from .capacity import USUAL_PAGE, check_pool, format_bytes, ranks_on_device

if TYPE_CHECKING:
    from minisgl_core.core import Context

    from .config import EngineConfig

__all__ = ["MemoryUse", "Reserve", "count_pages"]

logger = logging.getLogger(__name__)

CPU_SHARE = 0.5
"""A CPU's memory belongs to other programs and ranks too, and passes are not profiled there."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes that the pool must leave, as memory profiling measured them; zeros where it did not run."""

    tables: int = 0
    """Device state and buffers of captures, which live as long as the engine."""
    passes: int = 0
    """The most that an eager pass needs at once."""
    graphs: int = 0
    num_graphs: int = 0

    @property
    def total(self) -> int:
        return self.tables + self.passes + self.graphs


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one rank's device once its engine is ready; None = not measured."""

    reserve: Reserve
    pool: int
    graphs: int | None
    """What the graphs really used."""
    free: int | None
    """What is left for passes and for other programs."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "pool": self.pool,
            "graphs": self.graphs,
            "graphs_expected": self.reserve.graphs,
            "passes_expected": self.reserve.passes,
            "free": self.free,
        }

    def warn_if_short(self) -> None:
        """Warn if less memory is left than the largest profiled pass used."""
        if self.free is not None and self.free < self.reserve.passes:
            logger.warning(
                "%s of device memory are left, a pass may need %s; lower `memory_ratio` or `max_prefill_tokens`",
                format_bytes(self.free),
                format_bytes(self.reserve.passes),
            )


def count_pages(
    config: EngineConfig, ctx: Context, page_size: int, kv_heads: int, kv_dtype: torch.dtype, reserve: Reserve
) -> int:
    """Pages of the pool: the requested number, else what ``reserve`` leaves, but no more than all rows at full length
    could use.

    Every rank gets the same number, the smallest that any of them can hold. Raises :class:`EngineError` if not even one
    sequence of two tokens fits.
    """
    c = ctx.config
    page_bytes = PagedKVPool.bytes_per_page(c.num_layers, page_size, kv_heads, c.head_dim, kv_dtype)
    if config.num_page_override is not None:
        check_pool(config.num_page_override, ctx, page_size, kv_heads, kv_dtype)
        return config.num_page_override
    useful = config.max_running_req * -(-ctx.max_seq_len // page_size)
    free = ctx.platform.free_bytes()
    shared = ctx.device.type == "cpu" and not isinstance(ctx.platform, MemoryGauge)
    share = config.memory_ratio * (CPU_SHARE if shared else 1.0) / ranks_on_device(ctx)
    budget = int(free * share) - reserve.total
    mine = min(useful, max(0, budget // page_bytes - 1))  # one page more is the dummy page
    counts = ctx.comm.all_gather(torch.tensor([[mine]], dtype=torch.int64, device=ctx.device))
    pages = int(counts.min())
    if pages * page_size < 2:
        raise _no_memory(config, free, share, reserve, page_size, page_bytes)
    return pages


def _no_memory(
    config: EngineConfig, free: int, share: float, reserve: Reserve, page_size: int, page_bytes: int
) -> EngineError:
    taken = {
        f"passes of up to {config.max_prefill_tokens} tokens": reserve.passes,
        f"{reserve.num_graphs} graphs": reserve.graphs,
        "page table and buffers": reserve.tables,
    }
    parts = ", ".join(f"{what} {format_bytes(count)}" for what, count in taken.items() if count)
    lower = ["page_size"] * (page_size > USUAL_PAGE)
    if reserve.total:
        lower += ["max_prefill_tokens", "max_running_req", *["cuda_graph_max_bs"] * bool(reserve.graphs)]
        lower += ["max_seq_len_override"]
    advice = f"lower {' or '.join(f'`{name}`' for name in lower)}, " if lower else ""
    return EngineError(
        f"no memory is left for the KV pool, one page of which takes {format_bytes(page_bytes)}: "
        f"of {format_bytes(free)} free after loading, {share:.0%} may be used"
        f"{f', and {parts} come first' if parts else ''}",
        field="memory_ratio",
        value=config.memory_ratio,
        remedy=f"{advice}free memory, raise `memory_ratio` or choose a smaller model",
    )
