"""Allocates pages of the KV pool in bulk."""

from __future__ import annotations

import numpy as np

from .base import IntegrityError

__all__ = ["PageAllocator"]


class PageAllocator:
    """A stack of free pages with O(1) calls.

    The page freed last is reused first; a fresh pool hands out low numbers first. The pool's dummy page is not among
    the ``num_pages``, so it is never allocated.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._top = num_pages

    @property
    def free_pages(self) -> int:
        return self._top

    def allocate(self, num_pages: int) -> np.ndarray:
        """Allocate pages: (num_pages,) int32, a copy.

        Raises :class:`IntegrityError` if fewer are free; callers check first.
        """
        low = self._top - num_pages
        if num_pages < 0 or low < 0:
            raise IntegrityError(f"{num_pages} pages requested with {self._top} of {self.num_pages} free")
        pages = self._stack[low : self._top][::-1].copy()
        self._top = low
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Free pages. Raises :class:`IntegrityError` if more are returned than were allocated."""
        high = self._top + len(pages)
        if high > self.num_pages:
            raise IntegrityError(f"{len(pages)} pages came back to {self._top} free of {self.num_pages}")
        self._stack[self._top : high] = pages[::-1]
        self._top = high

    def pages(self) -> np.ndarray:
        """The free pages: (free_pages,) int32, a copy, for the integrity check."""
        return self._stack[: self._top].copy()
