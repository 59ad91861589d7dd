from __future__ import annotations

import numpy as np
import pytest

from minisgl_core.kvcache import CacheManager, IntegrityError, NaiveCache, RadixCache, match_len


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def run_of(length: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + length, dtype=np.int32)


def make(num_pages: int, page_size: int) -> CacheManager:
    return CacheManager(num_pages, page_size, RadixCache(page_size))


def serve(manager: CacheManager, tokens: np.ndarray) -> np.ndarray:
    """A Req's whole life; returns its pages."""
    handle = manager.match(tokens[:-1])
    manager.lock(handle)
    held = handle.cached_len // manager.page_size
    pages = np.concatenate([handle.pages, manager.allocate(manager.pages_for(len(tokens)) - held)])
    manager.check([(pages, handle)])
    manager.cache_req(tokens, pages, handle)
    return pages


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([2], [1], 0), ([1, 2, 9, 4], [1, 2, 3, 4], 2)],
)
def test_match_len(a: list[int], b: list[int], expected: int) -> None:
    assert match_len(ids(*a), ids(*b)) == expected


def test_a_prefix_that_is_extended_is_young_again() -> None:
    """Its end is dropped meanwhile; what is left of it was used later than the other prefix."""
    cache = RadixCache(1)
    first = cache.insert(cache.match(ids(1)), ids(1, 2), ids(0, 1)).handle
    cache.insert(cache.match(ids(5)), ids(5, 6), ids(2, 3))
    cache.lock(first)
    longer = cache.extend(first, ids(1, 2, 3), ids(0, 1, 4))
    assert cache.forget(longer).tolist() == [4]
    cache.unlock(first)
    assert sorted(cache.evict(2).tolist()) == [2, 3]
    cache.check([])


@pytest.mark.parametrize("length", [16, 32, 48])
def test_case_17_whole_prompt_on_a_page_boundary(length: int) -> None:
    manager = make(8, 16)
    prompt = run_of(length)
    lengths = []
    for _ in range(3):
        lengths.append(manager.match(prompt[:-1]).cached_len)
        serve(manager, prompt)
        manager.check([])
    assert lengths == [0, length - 16, length - 16], "at least one token is left to compute"
    assert len(manager.prefix_cache.pages()) == length // 16, "the last page is cached once, its duplicates were freed"


def test_case_20_eviction_units() -> None:
    manager = make(4, 4)
    for start in (0, 100):
        pages = serve(manager, run_of(8, start))
    assert manager.free_pages == 0
    assert manager.available_pages == 4
    taken = manager.allocate(2)
    assert manager.prefix_cache.evictable_pages * 4 == 8, "exactly 8 of 16 tokens were evicted"
    assert taken.tolist() != pages.tolist()
    assert len(set(taken.tolist())) == 2
    assert manager.match(run_of(8, 0)).cached_len == 0, "the older prefix went"
    assert manager.match(run_of(8, 100)).cached_len == 8


def test_eviction_takes_the_tail_of_a_prefix_first() -> None:
    manager = make(4, 4)
    serve(manager, run_of(16))
    manager.allocate(1)
    assert manager.match(run_of(16)).cached_len == 12


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 33])
def test_case_21_lengths_around_a_page(length: int) -> None:
    manager = make(8, 16)
    prompt = run_of(length)
    for _ in range(2):
        serve(manager, prompt)
        manager.check([])
    assert manager.match(prompt[:-1]).cached_len == (length - 1) // 16 * 16
    assert manager.free_pages == 8 - length // 16


def test_case_21_prompts_that_part_inside_a_page() -> None:
    manager = make(8, 64)
    first, second = run_of(128), run_of(128)
    second[63] = 9999
    serve(manager, first)
    serve(manager, second)
    manager.check([])
    assert manager.match(second).cached_len == 128
    mixed = np.concatenate([first[:64], second[64:]])
    mixed[64:] += 5000
    assert manager.match(mixed).cached_len == 64


def test_case_22_cached_pages_do_not_alias_the_page_table() -> None:
    manager = make(8, 2)
    prompt = run_of(6)
    row = serve(manager, prompt)
    before = manager.match(prompt).pages.tolist()
    row[:] = 77  # the next Req writes its own pages to the same row
    assert manager.match(prompt).pages.tolist() == before
    handle = manager.match(prompt)
    handle.pages[:] = 55
    assert manager.match(prompt).pages.tolist() == before


def test_case_23_lock_survives_a_split() -> None:
    manager = make(8, 1)
    cache = manager.prefix_cache
    serve(manager, run_of(8))
    start = (cache.evictable_pages, cache.protected_pages)
    locked = manager.match(run_of(8))
    manager.lock(locked)
    other = np.concatenate([run_of(4), run_of(4, 50)])
    assert manager.match(other).cached_len == 4  # splits the locked node
    manager.check([(locked.pages, locked)])
    assert manager.available_pages == 0
    assert len(cache.evict(8)) == 0
    assert manager.match(run_of(8)).pages.tolist() == locked.pages.tolist()
    manager.unlock(locked)
    manager.check([])
    assert (cache.evictable_pages, cache.protected_pages) == start


def test_least_recently_used_goes_first_and_a_match_counts_as_use() -> None:
    manager = make(3, 1)
    for start in (10, 20, 30):
        serve(manager, ids(start))
    manager.match(ids(10))
    manager.allocate(2)
    assert [manager.match(ids(start)).cached_len for start in (10, 20, 30)] == [1, 0, 0]


def test_publish_shares_pages_of_a_running_req() -> None:
    manager = make(8, 2)
    tokens = run_of(5)
    handle = manager.match(tokens[:-1])
    manager.lock(handle)
    pages = manager.allocate(3)
    handle = manager.publish(tokens, pages, handle)
    manager.check([(pages, handle)])
    assert handle.cached_len == 4
    assert manager.match(tokens).pages.tolist() == pages[:2].tolist()
    assert manager.available_pages == 5, "published pages are locked"
    manager.cache_req(tokens, pages, handle)
    manager.check([])
    assert manager.available_pages == 8


def test_publish_leaves_tokens_that_another_published() -> None:
    manager = make(8, 1)
    tokens = run_of(3)
    held = []
    for _ in range(2):
        handle = manager.match(ids())
        manager.lock(handle)
        pages = manager.allocate(3)
        held.append((pages, manager.publish(tokens, pages, handle)))
        manager.check(held)
    assert [handle.cached_len for _, handle in held] == [3, 0]
    for index, (pages, handle) in enumerate(held):
        manager.cache_req(tokens, pages, handle)
        manager.check(held[index + 1 :])
    assert manager.free_pages == 5


def test_dropped_pages_leave_the_tree_unless_another_needs_them() -> None:
    manager = make(8, 1)
    serve(manager, run_of(2))
    handle = manager.match(run_of(2))
    manager.lock(handle)
    tokens = run_of(4)
    pages = np.concatenate([handle.pages, manager.allocate(2)])
    handle = manager.publish(tokens, pages, handle)
    other = manager.match(run_of(2))
    manager.lock(other)
    manager.drop_req(pages, handle)
    manager.check([(other.pages, other)])
    assert manager.match(tokens).cached_len == 2
    manager.drop_req(other.pages, other)
    manager.check([])
    assert manager.free_pages == 8


def test_naive_cache_keeps_nothing() -> None:
    manager = CacheManager(4, 4, NaiveCache())
    serve(manager, run_of(8))
    manager.check([])
    assert manager.match(run_of(8)).cached_len == 0
    assert manager.free_pages == 4


def test_clear_cache_spares_what_is_locked() -> None:
    manager = make(8, 1)
    serve(manager, run_of(3))
    serve(manager, run_of(3, 50))
    handle = manager.match(run_of(3))
    manager.lock(handle)
    manager.clear_cache()
    manager.check([(handle.pages, handle)])
    assert manager.free_pages == 5


def corrupt_free_list(manager: CacheManager) -> None:
    manager.allocator._stack[0] = manager.prefix_cache.pages()[0]


def corrupt_tree_page(manager: CacheManager) -> None:
    next(iter(manager.prefix_cache._root.children.values())).pages[0] = manager.allocator.pages()[0]  # type: ignore[attr-defined]


def corrupt_outside(manager: CacheManager) -> None:
    manager.allocator._stack[0] = 1234


def corrupt_refs(manager: CacheManager) -> None:
    next(iter(manager.prefix_cache._root.children.values())).refs = 1  # type: ignore[attr-defined]


def corrupt_counter(manager: CacheManager) -> None:
    manager.prefix_cache.evictable_pages += 1


def corrupt_queue(manager: CacheManager) -> None:
    next(iter(manager.prefix_cache._root.children.values())).queued = False  # type: ignore[attr-defined]


def lose_a_page(manager: CacheManager) -> None:
    manager.allocate(1)


@pytest.mark.parametrize(
    ("corruption", "message"),
    [
        (corrupt_free_list, r"owned more than once \[0\] \(1\)"),
        (corrupt_tree_page, r"owned by none \[0\] \(1\), owned more than once \[7\] \(1\)"),
        (corrupt_outside, r"a page outside \[0, 8\)"),
        (corrupt_refs, "counts 1 locks, live handles hold 0"),
        (corrupt_counter, "holds 3 evictable and 0 protected pages, its counters say 4 and 0"),
        (corrupt_queue, "not queued"),
        (lose_a_page, r"owned by none \[3\] \(1\)"),
    ],
)
def test_case_19_a_seeded_corruption_is_reported(corruption: object, message: str) -> None:
    manager = make(8, 1)
    serve(manager, run_of(3))
    manager.check([])
    corruption(manager)  # type: ignore[operator]
    with pytest.raises(IntegrityError, match=message):
        manager.check([])


def test_case_19_a_req_with_other_pages_than_its_handle_is_reported() -> None:
    manager = make(8, 1)
    serve(manager, run_of(3))
    handle = manager.match(run_of(3))
    manager.lock(handle)
    with pytest.raises(IntegrityError, match="not those of its handle"):
        manager.check([(handle.pages[::-1], handle)])


def test_unlocking_twice_is_noticed() -> None:
    manager = make(8, 1)
    serve(manager, run_of(3))
    handle = manager.match(run_of(3))
    manager.lock(handle)
    manager.unlock(handle)
    with pytest.raises(IntegrityError, match="was not locked"):
        manager.unlock(handle)


def test_locking_a_handle_whose_pages_were_evicted_is_noticed() -> None:
    manager = make(3, 1)
    serve(manager, run_of(3))
    handle = manager.match(run_of(3))
    manager.allocate(1)
    with pytest.raises(IntegrityError, match="3 tokens of which 2 are left"):
        manager.lock(handle)
