"""The KV kernels and the shapes they are launched in: everything that is decided on the host before one runs."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from ..launch import Kernel, Shape

__all__ = ["INDEX", "STORE", "UNITS", "shape_for", "unit_of"]

UNITS: Final = {16: "minisgl::Bytes16", 4: "uint32_t", 2: "uint16_t", 1: "uint8_t"}
"""What a thread moves at a time, by its size in bytes, widest first."""

STORE: Final = Kernel(
    "minisgl::kv_store",
    (
        "k_cache",
        "v_cache",
        "k",
        "v",
        "out_loc",
        "k_slot_bytes",
        "v_slot_bytes",
        "k_token_bytes",
        "v_token_bytes",
        "row_units",
        "tokens",
    ),
)
INDEX: Final = Kernel(
    "minisgl::kv_index", ("out", "table", "ids", "start", "rows", "table_row_bytes", "row_units", "tokens")
)

WARP: Final = 32
BLOCK: Final = 256
"""Threads"""
SPREAD: Final = 256
"""Blocks below which a block gets one row only: small batches should reach many multiprocessors."""


def unit_of(joint: int) -> int:
    """The widest unit that divides all the addresses and lengths whose bits ``joint`` unites."""
    if not joint & 15:
        return 16
    return min(joint & -joint, 4)


@lru_cache(maxsize=1024)
def shape_for(rows: int, units: int) -> Shape:
    """One warp or several for each of ``rows`` rows of ``units`` units; ``rows`` is not 0."""
    lanes = max(WARP, min(BLOCK, -(-units // WARP) * WARP))
    per_block = max(1, min(BLOCK // lanes, rows // SPREAD))
    return Shape(-(-rows // per_block), lanes, per_block)
