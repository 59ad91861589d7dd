"""A radix tree over token ids whose edges are whole pages.

The idea is RadixAttention (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", section
3). The key of a node is the run of tokens on the edge from its parent, a multiple of S; siblings differ in their first
page. Locks are counted along the path to the root, so an unlocked node has only unlocked nodes below it, and eviction
can always start at the leaves. "Least recently used" is measured by a counter of calls, not by a clock, so that every
tensor-parallel rank evicts alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

import numpy as np

from .base import CacheHandle, Inserted, IntegrityError, MatchLen, match_len

__all__ = ["RadixCache"]


class _Node:
    __slots__ = ("children", "key", "pages", "parent", "queued", "refs", "serial", "used")

    def __init__(self, parent: _Node | None, key: np.ndarray, pages: np.ndarray, serial: int) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.serial = serial
        self.children: dict[bytes, _Node] = {}
        self.refs = 0
        self.used = 0
        self.queued = False
        """Whether the node is in the eviction queue, at most once."""


class RadixCache:
    """A :class:`~minisgl_core.kvcache.base.PrefixCache` as a radix tree. ``match_len`` may be a compiled kernel."""

    def __init__(self, page_size: int, match_len: MatchLen = match_len) -> None:
        self.page_size = page_size
        self.evictable_pages = 0
        self.protected_pages = 0
        self._match_len = match_len
        self._clock = 0
        self._serial = 0
        empty = np.empty(0, dtype=np.int32)
        self._root = _Node(None, empty, empty, 0)
        self._queue: list[tuple[int, int, _Node]] = []
        """(used, serial, node) of every unlocked leaf. Some entries are stale: their node is no unlocked leaf any more,
        or ``used`` is old.
        """

    # ---- look-up -------------------------------------------------------------------------------------------------

    def match(self, tokens: np.ndarray) -> CacheHandle:
        node, length = self._descend(self._root, tokens, 0)
        return self._handle(node, length)

    def insert(self, handle: CacheHandle, tokens: np.ndarray, pages: np.ndarray) -> Inserted:
        end = len(tokens) // self.page_size * self.page_size
        node, known = self._descend(handle.node, tokens[:end], handle.cached_len)
        if known < end:
            node = self._add_leaf(node, tokens, pages, known, end)
        return Inserted(self._handle(node, max(known, end)), known)

    def extend(self, handle: CacheHandle, tokens: np.ndarray, pages: np.ndarray) -> CacheHandle:
        start, end = handle.cached_len, len(tokens) // self.page_size * self.page_size
        # A child that begins with the same page means that another Req has published these tokens.
        if start >= end or tokens[start : start + self.page_size].tobytes() in handle.node.children:
            return handle
        self._clock += 1
        self._touch_path(handle.node)
        return self._handle(self._add_leaf(handle.node, tokens, pages, start, end), end)

    def _descend(self, node: _Node, tokens: np.ndarray, start: int) -> tuple[_Node, int]:
        """Follow ``tokens[start:]`` down from ``node``, and split an edge that matches only in part."""
        size = self.page_size
        self._clock += 1
        self._touch_path(node)
        while start + size <= len(tokens):
            child = node.children.get(tokens[start : start + size].tobytes())
            if child is None:
                break
            agreed = self._match_len(child.key, tokens[start:]) // size * size
            if agreed < len(child.key):
                child = self._split(child, agreed)
            child.used = self._clock
            node, start = child, start + agreed
        return node, start

    def _touch_path(self, node: _Node | None) -> None:
        # The ancestors of a node touched in this call have been touched as well.
        while node is not None and node.used != self._clock:
            node.used = self._clock
            node = node.parent

    def _split(self, node: _Node, length: int) -> _Node:
        """Insert a new node above ``node`` for its first ``length`` tokens."""
        # ``node`` remains the end of its own prefixes, so that handles to it stay valid.
        assert node.parent is not None
        cut = length // self.page_size
        upper = self._new_node(node.parent, node.key[:length], node.pages[:cut])
        upper.refs, upper.used = node.refs, node.used
        node.parent.children[self._first_page(upper)] = upper
        node.key, node.pages, node.parent = node.key[length:], node.pages[cut:], upper
        upper.children[self._first_page(node)] = node
        return upper

    def _add_leaf(self, parent: _Node, tokens: np.ndarray, pages: np.ndarray, start: int, end: int) -> _Node:
        """Add a leaf for ``tokens[start:end]``."""
        # Copies, because the arguments may be views of a page table.
        held = pages[start // self.page_size : end // self.page_size].copy()
        leaf = self._new_node(parent, tokens[start:end].copy(), held)
        leaf.used = self._clock
        parent.children[self._first_page(leaf)] = leaf
        self.evictable_pages += len(held)
        self._enqueue(leaf)
        return leaf

    def _new_node(self, parent: _Node, key: np.ndarray, pages: np.ndarray) -> _Node:
        self._serial += 1
        return _Node(parent, key, pages, self._serial)

    def _first_page(self, node: _Node) -> bytes:
        return node.key[: self.page_size].tobytes()

    def _path(self, node: _Node) -> Iterator[_Node]:
        """``node`` and its ancestors, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _handle(self, node: _Node, length: int) -> CacheHandle:
        parts = [step.pages for step in self._path(node)]
        pages = np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int32)
        return CacheHandle(length, pages, node)

    # ---- locks ---------------------------------------------------------------------------------------------------

    def lock(self, handle: CacheHandle) -> None:
        length = 0
        for node in self._path(handle.node):
            if node.refs == 0:
                self.evictable_pages -= len(node.pages)
                self.protected_pages += len(node.pages)
            node.refs += 1
            length += len(node.key)
        if length != handle.cached_len:
            raise IntegrityError(f"locked a handle of {handle.cached_len} tokens of which {length} are left")

    def unlock(self, handle: CacheHandle) -> None:
        for node in self._path(handle.node):
            if node.refs == 0:
                raise IntegrityError(f"unlocked a handle of {handle.cached_len} tokens that was not locked")
            node.refs -= 1
            if node.refs == 0:
                self.evictable_pages += len(node.pages)
                self.protected_pages -= len(node.pages)
                self._enqueue(node)

    # ---- eviction ------------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> np.ndarray:
        taken: list[np.ndarray] = []
        while num_pages > 0 and (leaf := self._pop_oldest_leaf()) is not None:
            taken.append(self._cut_tail(leaf, num_pages))
            num_pages -= len(taken[-1])
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int32)

    def forget(self, handle: CacheHandle) -> np.ndarray:
        taken: list[np.ndarray] = []
        # A list, because cutting a node detaches it from the path.
        for node in list(self._path(handle.node)):
            if node.children or node.refs:
                break
            taken.append(self._cut_tail(node, len(node.pages)))
        if taken:
            # Removed nodes would stay in the queue until the next eviction, which may never happen.
            self._queue = [entry for entry in self._queue if entry[2].parent is not None]
            heapq.heapify(self._queue)
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int32)

    def _cut_tail(self, leaf: _Node, num_pages: int) -> np.ndarray:
        """Remove up to ``num_pages`` from the end of an unlocked leaf; remove the leaf if it becomes empty."""
        keep = max(len(leaf.pages) - num_pages, 0)
        cut = leaf.pages[keep:]
        self.evictable_pages -= len(cut)
        if keep:
            leaf.key, leaf.pages = leaf.key[: keep * self.page_size], leaf.pages[:keep]
            self._enqueue(leaf)
        else:
            assert leaf.parent is not None
            del leaf.parent.children[self._first_page(leaf)]
            # The parent may have become an unlocked leaf. Handles to the removed node see that it has no tokens left.
            self._enqueue(leaf.parent)
            leaf.parent, leaf.key, leaf.pages = None, leaf.key[:0], leaf.pages[:0]
        return cut

    def _enqueue(self, node: _Node) -> None:
        if not (node.queued or node.children or node.refs) and node.parent is not None:
            node.queued = True
            # The serial number breaks ties, so that nodes are never compared and all ranks evict in the same order.
            heapq.heappush(self._queue, (node.used, node.serial, node))

    def _pop_oldest_leaf(self) -> _Node | None:
        while self._queue:
            used, _, node = heapq.heappop(self._queue)
            node.queued = False
            if used == node.used and not node.children and not node.refs and node.parent is not None:
                return node
            self._enqueue(node)  # used since it was queued: move it to its new place if it is still an unlocked leaf
        return None

    # ---- integrity -----------------------------------------------------------------------------------------------

    def _nodes(self) -> Iterator[_Node]:
        stack = [*self._root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def pages(self) -> np.ndarray:
        return np.concatenate([node.pages for node in self._nodes()] or [self._root.pages])

    def check(self, locked: Iterable[CacheHandle]) -> None:
        refs: dict[int, int] = {}
        for handle in locked:
            length = 0
            for node in self._path(handle.node):
                refs[id(node)] = refs.get(id(node), 0) + 1
                length += len(node.key)
            if length != handle.cached_len:
                raise IntegrityError(f"a live handle of {handle.cached_len} tokens has {length} in the tree")
        evictable = protected = 0
        for node in self._nodes():
            self._check_node(node, refs.pop(id(node), 0))
            if node.refs:
                protected += len(node.pages)
            else:
                evictable += len(node.pages)
        if refs:
            raise IntegrityError(f"{len(refs)} nodes of live handles are not in the tree")
        if (evictable, protected) != (self.evictable_pages, self.protected_pages):
            raise IntegrityError(
                f"the tree holds {evictable} evictable and {protected} protected pages, its counters say "
                f"{self.evictable_pages} and {self.protected_pages}"
            )

    def _check_node(self, node: _Node, live: int) -> None:
        if node.refs != live:
            raise IntegrityError(f"a node of {len(node.key)} tokens counts {node.refs} locks, live handles hold {live}")
        if not len(node.pages) or len(node.key) != len(node.pages) * self.page_size:
            raise IntegrityError(
                f"a node has {len(node.key)} tokens and {len(node.pages)} pages of {self.page_size} tokens"
            )
        if node.parent is None or node.parent.children.get(self._first_page(node)) is not node:
            raise IntegrityError(f"a node of {len(node.key)} tokens is not its parent's child")
        if not (node.refs or node.children or node.queued):
            raise IntegrityError(f"an unlocked leaf of {len(node.key)} tokens can never be evicted: it is not queued")
