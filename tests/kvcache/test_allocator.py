from __future__ import annotations

import numpy as np
import pytest

from minisgl_core.kvcache import IntegrityError, PageAllocator, page_slots


def test_a_fresh_pool_hands_out_low_pages_first() -> None:
    allocator = PageAllocator(8)
    assert allocator.allocate(3).tolist() == [0, 1, 2]
    assert allocator.allocate(2).tolist() == [3, 4]
    assert allocator.free_pages == 3


def test_freed_pages_are_reused_in_the_order_they_were_held() -> None:
    allocator = PageAllocator(8)
    first = allocator.allocate(3)
    allocator.allocate(2)
    allocator.free(first)
    assert allocator.allocate(4).tolist() == [0, 1, 2, 5]


def test_pages_are_copies_of_the_free_list() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(4)
    allocator.free(pages)
    pages[:] = 99
    assert sorted(allocator.allocate(4).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("asked", [5, -1])
def test_requesting_too_many_pages_names_both_numbers(asked: int) -> None:
    with pytest.raises(IntegrityError, match=f"{asked} pages requested with 4 of 4 free"):
        PageAllocator(4).allocate(asked)


def test_freeing_twice_is_noticed() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.free(pages)
    with pytest.raises(IntegrityError, match="2 pages came back to 4 free of 4"):
        allocator.free(pages)


def test_slots_of_pages() -> None:
    pages = np.array([3, 0], dtype=np.int32)
    assert page_slots(pages, 4).tolist() == [12, 13, 14, 15, 0, 1, 2, 3]
    assert page_slots(pages, 4).dtype == np.int32
    assert page_slots(pages, 1).tolist() == [3, 0]
