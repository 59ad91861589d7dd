"""Reduces a capsule of attention: rows, tokens, pages, heads."""

from __future__ import annotations

from ..search import Fails, fewer, subset
from .capsule import AttentionCapsule
from .cuts import with_kv_heads, with_rows, without_pages, without_queries, without_tail

__all__ = ["reduce_attention"]


def reduce_attention(capsule: AttentionCapsule, fails: Fails[AttentionCapsule]) -> AttentionCapsule:
    """Remove rows, then shorten the rest, then remove heads."""
    capsule = subset(capsule, len(capsule.uids), with_rows, fails)
    for row in range(len(capsule.uids)):
        capsule = _shorter_row(capsule, row, fails)
    return subset(capsule, capsule.geometry.kv_heads, with_kv_heads, fails)


def _shorter_row(capsule: AttentionCapsule, row: int, fails: Fails[AttentionCapsule]) -> AttentionCapsule:
    """Reduce a row's new tokens, its first pages and its end."""
    size = capsule.geometry.page_size

    def front(item: AttentionCapsule) -> int:
        """Whole pages before the row's new tokens."""
        return (item.kv_lens[row] - item.q_lens[row]) // size

    def tail(item: AttentionCapsule) -> int:
        return (item.kv_lens[row] if item.phase == "decode" else item.q_lens[row]) - 1

    def queries(item: AttentionCapsule) -> int:
        return item.q_lens[row] - 1

    capsule = fewer(capsule, tail, lambda item, count: without_tail(item, row, count), fails)
    capsule = fewer(capsule, queries, lambda item, count: without_queries(item, row, count), fails)
    return fewer(capsule, front, lambda item, count: without_pages(item, row, count), fails)
