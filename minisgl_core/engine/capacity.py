"""Refuses what could never fit into the device before anything is allocated, and names the setting at fault."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from minisgl_core.errors import EngineError
from minisgl_core.kvcache.pool import PagedKVPool
from minisgl_core.modelconfig import num_parameters
from minisgl_core.plugin_api import MemoryGauge

if TYPE_CHECKING:
    from minisgl_core.core import Context

    from .config import EngineConfig

__all__ = [
    "USUAL_PAGE",
    "check_pool",
    "check_tables",
    "check_weights",
    "explain_shortage",
    "format_bytes",
    "ranks_on_device",
]

logger = logging.getLogger(__name__)
USUAL_ROWS, USUAL_CHUNK, USUAL_PAGE, USUAL_LENGTH, USUAL_HEAD_DIM = 256, 8192, 256, 4096, 256
"""A setting up to here is not named as the cause while another one is larger than its own usual value."""
UPLOAD_BYTES = 64
"""Of packed uploads, for each token of a pass: four numbers, in three host buffers and on the device"""
SLOT_BYTES = 8
"""Of the page table, on the device and mirrored on the host"""
NUMBERED = 2**31
"""How many slots, or places of the page table, an int32 can number"""


class Setting(NamedTuple):
    """A number that memory grows with."""

    name: str
    value: int
    usual: int
    remedy: str = "give a smaller number"


def format_bytes(count: float) -> str:
    """For people, with about three digits."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def ranks_on_device(ctx: Context) -> int:
    """How many ranks share the device's memory: all of them on a CPU."""
    return ctx.tp.size if ctx.device.type == "cpu" and not isinstance(ctx.platform, MemoryGauge) else 1


def check_weights(ctx: Context) -> None:
    """Raise :class:`EngineError` for a model of the core that is larger than the device's memory."""
    measured = isinstance(ctx.platform, MemoryGauge)
    present = ctx.platform.free_bytes() if measured else ctx.platform.total_bytes()
    ranks, count = ranks_on_device(ctx), num_parameters(ctx.config, ctx.tp.size)
    needed = count * ctx.dtype.itemsize
    if needed * ranks <= present:
        return
    each = f" on each of {ctx.tp.size} ranks" if ctx.tp.size > 1 else ""
    raise EngineError(
        f"the weights need {format_bytes(needed)}{each} in {str(ctx.dtype).removeprefix('torch.')}, the device has "
        f"{format_bytes(present)}{' free' if measured else ''}",
        field="model",
        value=needed,
        remedy="choose a smaller model"
        + (" or the `dtype` bfloat16" if ctx.dtype.itemsize > 2 and 2 * count * ranks <= present else "")
        + (", or divide it over more devices with `tp_size`" if measured else ""),
    )


def check_tables(config: EngineConfig, ctx: Context, page_size: int) -> None:
    """Warn of a context beyond the model's own; raise :class:`EngineError` for one, or for a number of rows or tokens,
    whose tables could not be held.
    """
    trained = ctx.config.max_position_embeddings
    if ctx.max_seq_len > trained:
        logger.warning("max_seq_len_override %d is beyond the %d tokens the model knows", ctx.max_seq_len, trained)
    if config.max_seq_len_override is None:
        length = Setting("max_position_embeddings", trained, USUAL_LENGTH, "give a smaller `max_seq_len_override`")
    else:
        length = Setting("max_seq_len_override", ctx.max_seq_len, USUAL_LENGTH)
    rows = Setting("max_running_req", config.max_running_req, USUAL_ROWS)
    chunk = Setting("max_prefill_tokens", config.max_prefill_tokens, USUAL_CHUNK)
    page = Setting("page_size", page_size, USUAL_PAGE)
    rotary = Setting("head_dim", ctx.config.rope.rotary_dim, USUAL_HEAD_DIM, "check config.json")

    def needed(of: Mapping[str, int]) -> int:
        width = -(-of[length.name] // of[page.name]) * of[page.name]
        table = width * SLOT_BYTES * (of[rows.name] + 1)
        return table + 4 * of[length.name] * of[rotary.name] + UPLOAD_BYTES * of[chunk.name]

    _check_fits(ctx, "page table, rotary table and buffers", (rows, chunk, page, rotary, length), needed)
    width = -(-ctx.max_seq_len // page_size) * page_size
    _check_numbered(rows, width, f"the page table gives each sequence {width} places")


def check_pool(num_pages: int, ctx: Context, page_size: int, kv_heads: int, kv_dtype: torch.dtype) -> None:
    """Raise :class:`EngineError` for a given number of pages that could not be held."""
    c = ctx.config
    pages = Setting("num_page_override", num_pages, 1)
    page = Setting("page_size", page_size, USUAL_PAGE)

    def needed(of: Mapping[str, int]) -> int:
        page_bytes = PagedKVPool.bytes_per_page(c.num_layers, of[page.name], kv_heads, c.head_dim, kv_dtype)
        return (of[pages.name] + 1) * page_bytes

    _check_fits(ctx, "KV pool", (page, pages), needed)
    _check_numbered(pages, page_size, f"a page has {page_size} slots")


def _check_numbered(many: Setting, size: int, each: str) -> None:
    """Raise :class:`EngineError` where ``many`` of ``size``, and one more as a dummy, are too many for an int32."""
    if (many.value + 1) * size > NUMBERED:
        raise EngineError(
            f"`{many.name}` is {many.value} and {each}: these cannot all be numbered, 2**31 at most can",
            field=many.name,
            value=many.value,
            remedy=f"give at most {NUMBERED // size - 1}",
        )


def _check_fits(
    ctx: Context, what: str, settings: Sequence[Setting], needed: Callable[[Mapping[str, int]], int]
) -> None:
    """Compare with the device, and name the first setting whose usual value would make the others fit; if no single one
    would, the first that is too large by itself.
    """
    present, ranks = ctx.platform.total_bytes(), ranks_on_device(ctx)
    given = {one.name: one.value for one in settings}
    usual = {one.name: min(one.value, one.usual) for one in settings}

    def fits(of: Mapping[str, int]) -> bool:
        return needed(of) * ranks <= present

    if fits(given):
        return
    alone = [one for one in settings if fits({**given, one.name: usual[one.name]})]
    by_itself = [one for one in settings if not fits({**usual, one.name: one.value})]
    culprit = (alone or by_itself or settings)[0]
    raise EngineError(
        f"`{culprit.name}` {culprit.value} needs {needed(given) * ranks / 1e9:.1f} GB for the {what}"
        f"{f' of {ranks} ranks' if ranks > 1 else ''}, the device has {present / 1e9:.1f} GB",
        field=culprit.name,
        value=culprit.value,
        remedy=culprit.remedy,
    )


@contextmanager
def explain_shortage(ctx: Context) -> Iterator[None]:
    """Around the allocation and loading of weights: turns an allocator's error into an :class:`EngineError`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch raises its own type only for GPUs; MemoryError has no text.
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        text = (str(error).splitlines() or ["out of memory"])[0]
        raise EngineError(
            f"the weights do not fit, with {format_bytes(ctx.platform.free_bytes())} free when one was allocated: "
            f"{text}",
            field="model",
            remedy="free memory, or choose a smaller model",
        ) from error
