"""The KV kernels and their launch shapes: what the host decides before a launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from ..launch import Kernel, Shape

__all__ = ["INDEX", "STORE", "UNITS", "shape_for", "unit_of"]

UNITS: Final = {16: "minisgl::Bytes16", 4: "uint32_t", 2: "uint16_t", 1: "uint8_t"}
"""What one thread moves at a time, keyed by its size in bytes, widest first."""

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
"""Threads of a block."""
SPREAD: Final = 256
"""With fewer blocks than this each block gets one row: small batches should reach many multiprocessors."""


def unit_of(align_bits: int) -> int:
    """The widest unit in bytes that divides all addresses and lengths; ``align_bits`` is their bitwise or."""
    if not align_bits & 15:
        return 16
    return min(align_bits & -align_bits, 4)


@lru_cache(maxsize=1024)
def shape_for(rows: int, units: int) -> Shape:
    """Launch shape for ``rows`` rows (at least one) of ``units`` units: one warp or more per row."""
    lanes = max(WARP, min(BLOCK, -(-units // WARP) * WARP))
    per_block = max(1, min(BLOCK // lanes, rows // SPREAD))
    return Shape(-(-rows // per_block), lanes, per_block)
