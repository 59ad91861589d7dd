"""A failing capsule made as small as it can be and still fail in the same way, by delta debugging.

Source: A. Zeller and R. Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE Transactions on Software
Engineering 28(2), 2002, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from minisgl_core.errors import UsageError

from .edits import with_kv_heads, with_layers, with_rows, without_pages, without_queries, without_tail
from .format import Capsule
from .replay import ReplayReport, replay

if TYPE_CHECKING:
    from minisgl_core.testing import Rig, Subject

__all__ = ["shrink", "shrink_while"]

Fails = Callable[[Capsule], bool]
_ROUNDS = 3


def shrink(
    capsule: Capsule, subject: Subject, rig: Rig, tried: Callable[[Capsule, bool], None] | None = None
) -> Capsule:
    """The smallest capsule found that fails as this one does: by a wrong result, or by the same exception.

    ``tried`` hears of every attempt and whether it still failed. Raises :class:`UsageError` if this one does not fail.
    """
    kind = _kind(replay(capsule, subject, rig, repeats=0))
    if kind is None:
        raise UsageError(
            f"{subject.label} computes this capsule right, so there is nothing to shrink ({capsule.summary()})",
            field="--shrink",
            remedy="leave out --shrink, or name the backend that fails",
        )

    def fails(smaller: Capsule) -> bool:
        found = _kind(replay(smaller, subject, rig, repeats=0)) == kind
        if tried is not None:
            tried(smaller, found)
        return found

    small = shrink_while(capsule, fails)
    return small.with_origin(shrunk_from=capsule.summary(), failed_on=subject.label)


def _kind(report: ReplayReport) -> str | None:
    if report.passed:
        return None
    return report.raised.partition(":")[0] or "wrong"


def shrink_while(capsule: Capsule, fails: Fails) -> Capsule:
    """Reduce layers, rows, heads and lengths, in turns, as long as ``fails``."""
    for _ in range(_ROUNDS):
        before = capsule.nbytes
        capsule = _subset(capsule, len(capsule.layers), with_layers, fails)
        capsule = _subset(capsule, len(capsule.uids), with_rows, fails)
        for row in range(len(capsule.uids)):
            capsule = _shorter_row(capsule, row, fails)
        capsule = _subset(capsule, capsule.geometry.kv_heads, with_kv_heads, fails)
        if capsule.nbytes >= before:
            break
    return capsule


def _subset(capsule: Capsule, count: int, keep: Callable[[Capsule, Sequence[int]], Capsule], fails: Fails) -> Capsule:
    """Keep as few of ``count`` parts as still fail (the algorithm ddmin of the source)."""
    kept, pieces = list(range(count)), 2
    while len(kept) > 1:
        size = -(-len(kept) // pieces)
        chunks = [kept[at : at + size] for at in range(0, len(kept), size)]
        rests = [[part for part in kept if part not in chunk] for chunk in chunks] if len(chunks) > 2 else []
        smaller = next((some for some in (*chunks, *rests) if fails(keep(capsule, some))), None)
        if smaller is not None:
            pieces = 2 if smaller in chunks else max(pieces - 1, 2)
            kept = smaller
        elif pieces >= len(kept):
            break
        else:
            pieces = min(2 * pieces, len(kept))
    return keep(capsule, kept) if len(kept) < count else capsule


def _shorter_row(capsule: Capsule, row: int, fails: Fails) -> Capsule:
    """Fewer new tokens, fewer pages in front, an earlier end."""
    size = capsule.geometry.page_size

    def front(item: Capsule) -> int:
        """Whole pages before the row's new tokens."""
        return (item.kv_lens[row] - item.q_lens[row]) // size

    def tail(item: Capsule) -> int:
        return (item.kv_lens[row] if item.phase == "decode" else item.q_lens[row]) - 1

    capsule = _fewer(capsule, tail, lambda item, count: without_tail(item, row, count), fails)
    capsule = _fewer(
        capsule, lambda item: item.q_lens[row] - 1, lambda item, count: without_queries(item, row, count), fails
    )
    return _fewer(capsule, front, lambda item, count: without_pages(item, row, count), fails)


def _fewer(
    capsule: Capsule, removable: Callable[[Capsule], int], remove: Callable[[Capsule, int], Capsule], fails: Fails
) -> Capsule:
    """Remove as many as still fails: all, else half, a quarter, ... and again from what is left."""
    step = removable(capsule)
    while step > 0:
        count = min(step, removable(capsule))
        if count <= 0:
            break
        smaller = remove(capsule, count)
        if fails(smaller):
            capsule = smaller
        else:
            step //= 2
    return capsule
