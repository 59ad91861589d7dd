"""The paged KV cache: ownership of pages, and which prefixes are cached."""

from .allocator import PageAllocator
from .base import CacheHandle, Inserted, IntegrityError, MatchLen, PrefixCache, match_len, page_slots, run_places
from .manager import CacheManager
from .naive import NaiveCache
from .radix import RadixCache

__all__ = [
    "CacheHandle",
    "CacheManager",
    "Inserted",
    "IntegrityError",
    "MatchLen",
    "NaiveCache",
    "PageAllocator",
    "PrefixCache",
    "RadixCache",
    "match_len",
    "page_slots",
    "run_places",
]
