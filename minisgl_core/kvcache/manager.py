"""Ownership of pages: free, in the prefix cache, or private to a Req."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .allocator import PageAllocator
from .base import CacheHandle, IntegrityError, PrefixCache

__all__ = ["CacheManager"]


class CacheManager:
    """The page allocator and the prefix cache behind one interface.

    A Req holds one locked :class:`CacheHandle` and an array of pages in token order. The first ``handle.cached_len /
    S`` of them belong to the cache, the others are private to the Req. The manager never keeps that array: arguments
    and results are copies.
    """

    def __init__(self, num_pages: int, page_size: int, prefix_cache: PrefixCache) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.allocator = PageAllocator(num_pages)

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated without evicting a prefix."""
        return self.allocator.free_pages

    @property
    def available_pages(self) -> int:
        """Pages that can be allocated at all: free ones and those of unlocked prefixes."""
        return self.allocator.free_pages + self.prefix_cache.evictable_pages

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> np.ndarray:
        """Allocate private pages, (num_pages,) int32, and evict old prefixes as needed.

        Raises :class:`IntegrityError` if even that is not enough; check :attr:`available_pages` first.
        """
        missing = num_pages - self.allocator.free_pages
        if missing > 0:
            self.allocator.free(self.prefix_cache.evict(missing))
        return self.allocator.allocate(num_pages)

    def match(self, tokens: np.ndarray) -> CacheHandle:
        """The longest cached prefix of ``tokens`` (int32). Lock it before anything is allocated."""
        return self.prefix_cache.match(tokens)

    def lock(self, handle: CacheHandle) -> None:
        self.prefix_cache.lock(handle)

    def unlock(self, handle: CacheHandle) -> None:
        self.prefix_cache.unlock(handle)

    def publish(self, tokens: np.ndarray, pages: np.ndarray, handle: CacheHandle) -> CacheHandle:
        """Share the whole pages of ``tokens`` while their Req still runs. Returns the locked handle to use from now on.

        If another Req has published the same tokens meanwhile, the pages stay private and ``handle`` is returned
        unchanged: passes in flight may use them.
        """
        longer = self.prefix_cache.extend(handle, tokens, pages)
        if longer is not handle:
            # Lock first: between the two calls no page may become evictable.
            self.prefix_cache.lock(longer)
            self.prefix_cache.unlock(handle)
        return longer

    def cache_req(self, tokens: np.ndarray, pages: np.ndarray, handle: CacheHandle) -> None:
        """End a Req: its whole pages of ``tokens`` (those with KV) stay cached as a prefix, the others are freed.

        ``pages`` are all pages of the Req, the cache's first. Freed are pages of tokens that another Req has cached
        meanwhile, the tail that fills no page, and pages allocated ahead. The handle is unlocked.
        """
        inserted = self.prefix_cache.insert(handle, tokens, pages)
        size = self.page_size
        # Another Req cached the tokens up to known_len first: its pages are kept, these duplicates are freed.
        self.allocator.free(pages[handle.cached_len // size : inserted.known_len // size])
        self.allocator.free(pages[inserted.handle.cached_len // size :])
        self.prefix_cache.unlock(handle)

    def drop_req(self, pages: np.ndarray, handle: CacheHandle) -> np.ndarray:
        """End a Req whose KV is not trusted, and free all of its pages.

        Pages that it had published are freed as well, unless another Req uses them. Returns the freed pages, (N,)
        int32.
        """
        # Unlock before forgetting: a locked node cannot be removed.
        self.prefix_cache.unlock(handle)
        freed = np.concatenate([pages[handle.cached_len // self.page_size :], self.prefix_cache.forget(handle)])
        self.allocator.free(freed)
        return freed

    def clear_cache(self) -> None:
        """Evict every unlocked prefix."""
        self.allocator.free(self.prefix_cache.evict(self.prefix_cache.evictable_pages))

    def check(self, reqs: Iterable[tuple[np.ndarray, CacheHandle]]) -> None:
        """Check the page accounting. ``reqs`` holds (all pages, handle) of every Req that has pages.

        Raises :class:`IntegrityError` unless free, cached and private pages partition the pool, the first pages of each
        Req are those of its handle, and the check of the prefix cache passes.
        """
        held = list(reqs)
        self.prefix_cache.check([handle for _, handle in held])
        private: list[np.ndarray] = []
        for pages, handle in held:
            shared = handle.cached_len // self.page_size
            if not np.array_equal(pages[:shared], handle.pages):
                raise IntegrityError(f"a Req's first {shared} pages are not those of its handle: {pages[:shared]}")
            private.append(pages[shared:])
        self._check_partition(self.allocator.pages(), self.prefix_cache.pages(), private)

    def _check_partition(self, free: np.ndarray, cached: np.ndarray, private: Sequence[np.ndarray]) -> None:
        pages = np.concatenate([free, cached, *private])
        count = f"{len(free)} free + {len(cached)} cached + {len(pages) - len(free) - len(cached)} private pages"
        if pages.size and not (pages.min() >= 0 and pages.max() < self.num_pages):
            raise IntegrityError(f"{count}: a page outside [0, {self.num_pages})")
        holders = np.bincount(pages, minlength=self.num_pages)
        if (holders != 1).any():
            lost, twice = np.flatnonzero(holders == 0), np.flatnonzero(holders > 1)
            raise IntegrityError(
                f"{count} do not partition the {self.num_pages} of the pool: owned by none {lost[:8].tolist()} "
                f"({len(lost)}), owned more than once {twice[:8].tolist()} ({len(twice)})"
            )
