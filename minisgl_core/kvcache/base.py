"""What a prefix cache is, whatever its insides. Lengths count tokens, sizes count pages; S is the page size."""

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
    """The cache's books do not balance: a bug of minisgl, never of its user."""


@dataclass(frozen=True, slots=True)
class CacheHandle:
    """A place in a prefix cache: the first ``cached_len`` tokens of some sequence. It keeps them only while locked."""

    cached_len: int
    pages: np.ndarray
    """(cached_len / S,) int32, a copy: the cache may split or drop its own arrays at any time."""
    node: Any
    """The cache's own."""


class Inserted(NamedTuple):
    """What an insert did: tokens [known_len, handle.cached_len) are new and their pages the cache's from now on."""

    handle: CacheHandle
    known_len: int


class PrefixCache(Protocol):
    """Remembers which pages hold the KV of which prefixes. Every decision depends on the calls alone: no clock."""

    evictable_pages: int
    """Pages that :meth:`evict` could give back now."""
    protected_pages: int
    """Pages below a locked handle."""

    def match(self, tokens: np.ndarray) -> CacheHandle:
        """The longest known prefix of ``tokens`` (int32), in whole pages, not locked."""
        ...

    def insert(self, handle: CacheHandle, tokens: np.ndarray, pages: np.ndarray) -> Inserted:
        """Remember ``tokens``, which begin with the prefix of ``handle``.

        ``pages`` holds token i at ``pages[i // S]`` for i >= handle.cached_len. Whole pages only: a tail is left out.
        The handle returned is not locked.
        """
        ...

    def extend(self, handle: CacheHandle, tokens: np.ndarray, pages: np.ndarray) -> CacheHandle:
        """As :meth:`insert`, but only where nothing is known beyond ``handle``; otherwise returns ``handle`` itself."""
        ...

    def lock(self, handle: CacheHandle) -> None:
        """Keep this prefix until :meth:`unlock`. Counted: each lock needs its unlock."""
        ...

    def unlock(self, handle: CacheHandle) -> None: ...

    def evict(self, num_pages: int) -> np.ndarray:
        """Forget the least recently used unlocked pages, exactly ``num_pages`` or all there are; returns them."""
        ...

    def forget(self, handle: CacheHandle) -> np.ndarray:
        """Drop the end of this prefix as far as no other prefix or lock needs it; returns the pages."""
        ...

    def pages(self) -> np.ndarray:
        """Every page held, in no particular order."""
        ...

    def check(self, locked: Iterable[CacheHandle]) -> None:
        """Raise :class:`IntegrityError` unless structure, sizes and reference counts agree with the live handles."""
        ...


def match_len(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two int32 arrays; the numpy form of the ``kv`` role's kernel."""
    length = min(len(a), len(b))
    if length == 0:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def page_slots(pages: np.ndarray, page_size: int) -> np.ndarray:
    """(N,) pages -> (N * S,) int32 slots, in order."""
    if page_size == 1:
        return pages
    slots = pages[:, None] * np.int32(page_size) + np.arange(page_size, dtype=np.int32)
    return slots.reshape(-1)


def run_places(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers ``starts[i], ..., starts[i] + counts[i] - 1`` of each run i, one run after the other.

    starts [7, 2], counts [2, 3] -> [7, 8, 2, 3, 4]
    """
    ends = np.cumsum(counts)
    places: np.ndarray = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
    return places
