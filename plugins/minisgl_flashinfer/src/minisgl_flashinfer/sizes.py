"""Computes the memory that FlashInfer's planner will need. H query heads, K kv heads, D head_dim, B rows.

The planner cuts keys into at most ``CTAS / K`` splits per kv head, so partial results are bounded by the grid.
"""

from __future__ import annotations

from typing import Final

__all__ = ["CUDA_CORE_RATIOS", "decode_partials", "use_tensor_cores", "workspace_bytes"]

CUDA_CORE_RATIOS: Final = (1, 2, 3, 4, 6, 8)
"""Query heads per kv head that the CUDA-core decode kernel is compiled for."""
_CTAS: Final = 2 * 160
"""Two blocks on each multiprocessor of the largest device (B200: 148), with a margin."""
_PREFILL_TILE: Final = 128
"""Most query rows of one tile."""
_MIB: Final = 1 << 20


def use_tensor_cores(ratio: int, wanted: bool | None) -> bool:
    """True if ``ratio`` query heads per kv head use the prefill kernel, on tensor cores, for decode.

    One of its tiles holds 16 query rows. If few of them are used it only adds work, and its plan takes longer.
    """
    if ratio not in CUDA_CORE_RATIOS:
        return True
    return ratio >= 4 if wanted is None else wanted


def workspace_bytes(q_heads: int, kv_heads: int, head_dim: int, mib: int | None) -> int:
    """Device memory for partial results: float32 rows and their sums, of a prefill that fills the grid by splitting.

    H = 32, K = 8, D = 128: 32 * (320 / 8) tiles * 128 rows * 129 * 4 bytes = 81 MiB, so 128.
    """
    if mib is not None:
        return mib * _MIB
    splits = -(-_CTAS // kv_heads)
    return max(128 * _MIB, q_heads * splits * _PREFILL_TILE * (head_dim + 1) * 4)


def decode_partials(rows: int, q_heads: int, kv_heads: int, head_dim: int) -> int:
    """Bytes that a captured tensor-core decode of ``rows`` rows reserves, whether or not it splits keys."""
    packed = q_heads // kv_heads
    tile = 16 if packed <= 16 else 64 if packed <= 64 else 128
    tiles = max(-(-_CTAS // kv_heads), -(-rows * packed // tile) + rows)
    return q_heads * tiles * tile * (head_dim + 1) * 4
