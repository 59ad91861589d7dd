"""FlashInfer's page list, derived on the device: one operation of a captured step."""

from __future__ import annotations

import torch

from minisgl_core.plugin_api import KernelLibrary

__all__ = ["flatten_pages"]

_library = KernelLibrary("minisgl_flashinfer")


def _flatten_pages(
    page_ids: torch.Tensor,
    kv_lens: torch.Tensor,
    page_size: int,
    indptr: torch.Tensor,
    pages: torch.Tensor,
    last_page_len: torch.Tensor,
) -> None:
    if page_ids.is_cuda:
        from .triton_ops.pages import launch

        return launch(page_ids, kv_lens, page_size, indptr, pages, last_page_len)
    counts = (kv_lens + (page_size - 1)) // page_size
    indptr[0] = 0
    torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
    torch.sub(kv_lens, (counts - 1) * page_size, out=last_page_len)
    packed = page_ids[torch.arange(page_ids.shape[1]) < counts[:, None]]
    pages[: packed.shape[0]] = packed
    return None


flatten_pages = _library.register(
    "flatten_pages(Tensor page_ids, Tensor kv_lens, int page_size, "
    "Tensor(a!) indptr, Tensor(b!) pages, Tensor(c!) last_page_len) -> ()",
    _flatten_pages,
    ("CPU", "CUDA"),
)
"""From page_ids (B, P) and kv_lens (B,) >= 1 fill indptr (B+1), pages (the live ids, packed to its front) and
last_page_len (B). All int32. What ``pages`` holds past ``indptr[B]`` is left as it was.

page_ids [[7, 3], [5, 9]], kv_lens [3, 1], page_size 2 -> indptr [0, 2, 3], pages [7, 3, 5, ...], last_page_len [1, 1].
"""
