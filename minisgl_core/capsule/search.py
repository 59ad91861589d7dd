"""Delta debugging: the search for the smallest input that still fails.

Source: A. Zeller and R. Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE Transactions on Software
Engineering 28(2), 2002, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["Fails", "fewer", "subset"]

T = TypeVar("T")
Fails = Callable[[T], bool]
"""Does this smaller item fail as the first one did?"""


def subset(item: T, count: int, keep: Callable[[T, Sequence[int]], T], fails: Fails[T]) -> T:
    """Keep as few of ``count`` parts as still fail (the algorithm ddmin of the source)."""
    kept, num_chunks = list(range(count)), 2
    while len(kept) > 1:
        size = -(-len(kept) // num_chunks)
        chunks = [kept[at : at + size] for at in range(0, len(kept), size)]
        rests = [[part for part in kept if part not in chunk] for chunk in chunks] if len(chunks) > 2 else []
        smaller = next((some for some in (*chunks, *rests) if fails(keep(item, some))), None)
        if smaller is not None:
            num_chunks = 2 if smaller in chunks else max(num_chunks - 1, 2)
            kept = smaller
        elif num_chunks >= len(kept):
            break
        else:
            num_chunks = min(2 * num_chunks, len(kept))
    return keep(item, kept) if len(kept) < count else item


def fewer(item: T, removable: Callable[[T], int], remove: Callable[[T, int], T], fails: Fails[T]) -> T:
    """Remove as much as possible while the rest still fails: all, else half, a quarter, and so on, repeatedly."""
    step = removable(item)
    while step > 0:
        count = min(step, removable(item))
        if count <= 0:
            break
        smaller = remove(item, count)
        if fails(smaller):
            item = smaller
        else:
            step //= 2
    return item
