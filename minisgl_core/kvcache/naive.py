"""A prefix cache that caches nothing."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .base import CacheHandle, Inserted, IntegrityError

__all__ = ["NaiveCache"]

NO_PAGES = np.empty(0, dtype=np.int32)


class NaiveCache:
    """Every match is empty and every insert is declined, so all pages stay private to their Req."""

    evictable_pages = 0
    protected_pages = 0

    def match(self, tokens: np.ndarray) -> CacheHandle:
        return CacheHandle(0, NO_PAGES, None)

    def insert(self, handle: CacheHandle, tokens: np.ndarray, pages: np.ndarray) -> Inserted:
        return Inserted(handle, 0)

    def extend(self, handle: CacheHandle, tokens: np.ndarray, pages: np.ndarray) -> CacheHandle:
        return handle

    def lock(self, handle: CacheHandle) -> None:
        return

    def unlock(self, handle: CacheHandle) -> None:
        return

    def evict(self, num_pages: int) -> np.ndarray:
        return NO_PAGES

    def forget(self, handle: CacheHandle) -> np.ndarray:
        return NO_PAGES

    def pages(self) -> np.ndarray:
        return NO_PAGES

    def check(self, locked: Iterable[CacheHandle]) -> None:
        for handle in locked:
            if handle.cached_len:
                raise IntegrityError(f"a handle of the naive cache claims {handle.cached_len} cached tokens")
