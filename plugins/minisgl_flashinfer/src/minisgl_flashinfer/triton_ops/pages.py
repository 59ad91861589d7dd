"""The kernel of :func:`minisgl_flashinfer.pages.flatten_pages`. B rows, P pages of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["launch"]

BLOCK = 1024
"""Page ids that one program copies."""


@triton.jit
def _flatten_kernel(
    page_ids_ptr,
    row_stride,
    kv_lens_ptr,
    indptr_ptr,
    pages_ptr,
    last_page_len_ptr,
    page_size,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Program (b, c) copies the c-th block of row b. Each adds up the pages before its row: the lengths are in cache.
    row, block = tl.program_id(0), tl.program_id(1)
    length = tl.load(kv_lens_ptr + row)
    count = (length + page_size - 1) // page_size
    at = block * BLOCK + tl.arange(0, BLOCK)
    if block * BLOCK < count:
        every = tl.arange(0, ROWS)
        lens = tl.load(kv_lens_ptr + every, mask=every < row, other=0)
        start = tl.sum((lens + page_size - 1) // page_size, axis=0)
        if block == 0:
            tl.store(indptr_ptr + row + 1, start + count)
            tl.store(last_page_len_ptr + row, length - (count - 1) * page_size)
            if row == 0:
                tl.store(indptr_ptr, 0)
        ids = tl.load(page_ids_ptr + row.to(tl.int64) * row_stride + at, mask=at < count, other=0)
        tl.store(pages_ptr + start + at, ids, mask=at < count)


def launch(
    page_ids: torch.Tensor,
    kv_lens: torch.Tensor,
    page_size: int,
    indptr: torch.Tensor,
    pages: torch.Tensor,
    last_page_len: torch.Tensor,
) -> None:
    """One kernel; the rows of ``page_ids`` are contiguous, lengths are at least 1."""
    rows, width = page_ids.shape
    _flatten_kernel[(rows, triton.cdiv(width, BLOCK))](
        page_ids,
        page_ids.stride(0),
        kv_lens,
        indptr,
        pages,
        last_page_len,
        page_size,
        ROWS=triton.next_power_of_2(rows),
        BLOCK=BLOCK,
    )
