"""The radix cache against a model that stores one entry per page and knows no tree, and case 19's long random walk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl_core.kvcache import CacheHandle, CacheManager, RadixCache

Prefix = tuple[int, ...]


class RadixMachine(RuleBasedStateMachine):
    """Model: each cached whole-page prefix -> [its last page, when it was last used]; live Reqs by their locks."""

    @initialize(page_size=st.sampled_from([1, 2, 4]))
    def start(self, page_size: int) -> None:
        self.size = page_size
        self.manager = CacheManager(12, page_size, RadixCache(page_size))
        self.cached: dict[Prefix, list[int]] = {}
        self.live: list[tuple[np.ndarray, np.ndarray, CacheHandle]] = []
        self.clock = 0

    def known(self, tokens: Prefix) -> int:
        end = 0
        while end + self.size <= len(tokens) and tokens[: end + self.size] in self.cached:
            end += self.size
        return end

    def touch(self, tokens: Prefix, end: int) -> None:
        self.clock += 1
        for cut in range(self.size, end + 1, self.size):
            self.cached[tokens[:cut]][1] = self.clock

    def locked(self, prefix: Prefix) -> bool:
        return any(
            tuple(tokens[: handle.cached_len].tolist())[: len(prefix)] == prefix for tokens, _, handle in self.live
        )

    def evict_from_model(self, count: int) -> None:
        for _ in range(count):
            leaves = [p for p in self.cached if not any(q != p and q[: len(p)] == p for q in self.cached)]
            oldest = min((p for p in leaves if not self.locked(p)), key=lambda p: self.cached[p][1])
            del self.cached[oldest]

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=14), publish=st.booleans())
    def begin(self, tokens: list[int], publish: bool) -> None:
        manager, key = self.manager, np.array(tokens, dtype=np.int32)
        handle = manager.match(key[:-1])
        hit = self.known(tuple(tokens[:-1]))
        assert handle.cached_len == hit
        assert handle.pages.tolist() == [
            self.cached[tuple(tokens[:cut])][0] for cut in range(self.size, hit + 1, self.size)
        ]
        self.touch(tuple(tokens), hit)
        need = manager.pages_for(len(tokens)) - hit // self.size
        manager.lock(handle)
        if need > manager.available_pages:
            manager.unlock(handle)
            return
        self.live.append((key, handle.pages, handle))
        self.evict_from_model(max(0, need - manager.free_pages))
        pages = np.concatenate([handle.pages, manager.allocate(need)])
        if publish:
            longer = manager.publish(key, pages, handle)
            if longer is not handle:
                self.learn(tuple(tokens), pages)
            handle = longer
        self.live[-1] = (key, pages, handle)

    def learn(self, tokens: Prefix, pages: np.ndarray) -> None:
        end = len(tokens) // self.size * self.size
        for cut in range(self.size, end + 1, self.size):
            self.cached.setdefault(tokens[:cut], [int(pages[cut // self.size - 1]), 0])
        self.touch(tokens, end)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99), keep=st.integers(0, 14))
    def finish(self, pick: int, keep: int) -> None:
        tokens, pages, handle = self.live.pop(pick % len(self.live))
        written = tokens[: max(min(keep, len(tokens)), handle.cached_len)]  # an aborted Req has computed only a part
        self.manager.cache_req(written, pages, handle)
        self.learn(tuple(written.tolist()), pages)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99))
    def drop(self, pick: int) -> None:
        tokens, pages, handle = self.live.pop(pick % len(self.live))
        self.manager.drop_req(pages, handle)
        prefix: Prefix = tuple(tokens[: handle.cached_len].tolist())
        while (
            prefix
            and not self.locked(prefix)
            and not any(len(q) > len(prefix) and q[: len(prefix)] == prefix for q in self.cached)
        ):
            del self.cached[prefix]
            prefix = prefix[: -self.size]

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check([(pages, handle) for _, pages, handle in self.live])
        assert sorted(self.manager.prefix_cache.pages().tolist()) == sorted(page for page, _ in self.cached.values())


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_case_19_ten_thousand_random_steps(page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    manager = CacheManager(64, page_size, RadixCache(page_size))
    contents: dict[int, bytes] = {}  # page -> the tokens up to its end: what a kernel would have written
    live: list[tuple[np.ndarray, np.ndarray, CacheHandle]] = []
    for step in range(10_000):
        if live and rng.random() < 0.5:
            tokens, pages, handle = live.pop(int(rng.integers(len(live))))
            computed = int(rng.integers(handle.cached_len, len(tokens) + 1))  # less than all: aborted
            manager.cache_req(tokens[:computed], pages, handle)
        else:
            tokens = rng.integers(0, 2, int(rng.integers(1, 12 * page_size)), dtype=np.int32)
            tokens[: page_size * int(rng.integers(0, 6))] = 7  # long common beginnings
            handle = manager.match(tokens[:-1])
            for index, page in enumerate(handle.pages.tolist()):
                assert contents[page] == tokens[: (index + 1) * page_size].tobytes()
            manager.lock(handle)
            need = manager.pages_for(len(tokens)) - len(handle.pages)
            if need > manager.available_pages:
                manager.unlock(handle)
                continue
            pages = np.concatenate([handle.pages, manager.allocate(need)])
            for index, page in enumerate(pages.tolist()):
                contents[page] = tokens[: (index + 1) * page_size].tobytes()
            handle = manager.publish(tokens, pages, handle) if rng.random() < 0.5 else handle
            live.append((tokens, pages, handle))
        if step % 7 == 0:
            manager.check([(pages, handle) for _, pages, handle in live])
    for tokens, pages, handle in live:
        manager.cache_req(tokens, pages, handle)
    manager.check([])
    assert manager.available_pages == 64
    manager.clear_cache()
    assert manager.free_pages == 64
