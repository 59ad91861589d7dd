"""The interface of a prefix cache. Lengths count tokens, sizes count pages; S is the page size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from minisgl_core.errors import EngineError

__all__ = [
    "CacheHandle",
    "Inserted",
    "IntegrityError",
    "MatchLen",
    "PrefixCache",
    "match_len",
    "page_slots",
    "run_places",
]

MatchLen = Callable[[np.ndarray, np.ndarray], int]
"""Length of the common prefix of two int32 arrays."""


class IntegrityError(EngineError):
    """The page accounting is inconsistent: a bug of minisgl, not a mistake of the user."""


@dataclass(frozen=True, slots=True)
class CacheHandle:
    """The first ``cached_len`` tokens of a sequence in a prefix cache, kept only while the handle is locked."""

    cached_len: int
    pages: np.ndarray
    """(cached_len / S,) int32, a copy: the cache may split or drop its own arrays at any time."""
    node: Any
    """Private to the cache."""


class Inserted(NamedTuple):
    """The result of an insert: tokens [known_len, handle.cached_len) are new; their pages now belong to the cache."""

    handle: CacheHandle
    known_len: int


class PrefixCache(Protocol):
    """Maps prefixes to the pages that hold their KV."""

    evictable_pages: int
    """Pages that :meth:`evict` could free now."""
    protected_pages: int
    """Pages of locked prefixes."""

    def match(self, tokens: np.ndarray) -> CacheHandle:
        """The longest cached prefix of ``tokens`` (int32), in whole pages. The returned handle is not locked."""
        ...

    def insert(self, handle: CacheHandle, tokens: np.ndarray, pages: np.ndarray) -> Inserted:
        """Insert ``tokens``, which begin with the prefix of ``handle``.

        ``pages`` holds token i at ``pages[i // S]`` for i >= handle.cached_len. Only whole pages are inserted; the tail
        is left out. The returned handle is not locked.
        """
        ...

    def extend(self, handle: CacheHandle, tokens: np.ndarray, pages: np.ndarray) -> CacheHandle:
        """Like :meth:`insert`, but only if nothing beyond ``handle`` is cached; otherwise returns ``handle`` itself."""
        ...

    def lock(self, handle: CacheHandle) -> None:
        """Protect this prefix from eviction until :meth:`unlock`. Locks are counted: each needs its own unlock."""
        ...

    def unlock(self, handle: CacheHandle) -> None: ...

    def evict(self, num_pages: int) -> np.ndarray:
        """Evict and return the least recently used unlocked pages: ``num_pages`` of them, or all if there are fewer."""
        ...

    def forget(self, handle: CacheHandle) -> np.ndarray:
        """Remove the end of this prefix that no other prefix and no lock needs. Returns its pages."""
        ...

    def pages(self) -> np.ndarray:
        """All pages of the cache, in no particular order."""
        ...

    def check(self, locked: Iterable[CacheHandle]) -> None:
        """Raise :class:`IntegrityError` unless structure, sizes and reference counts agree with the live handles."""
        ...


def match_len(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two int32 arrays: the NumPy version of the ``kv`` role's kernel."""
    length = min(len(a), len(b))
    if length == 0:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def page_slots(pages: np.ndarray, page_size: int) -> np.ndarray:
    """Slots of pages, in order: (N,) -> (N * S,) int32."""
    if page_size == 1:
        return pages
    slots = pages[:, None] * np.int32(page_size) + np.arange(page_size, dtype=np.int32)
    return slots.reshape(-1)


def run_places(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers ``starts[i], ..., starts[i] + counts[i] - 1`` of each run i, concatenated.

    starts [7, 2], counts [2, 3] -> [7, 8, 2, 3, 4]
    """
    ends = np.cumsum(counts)
    places: np.ndarray = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
    return places
