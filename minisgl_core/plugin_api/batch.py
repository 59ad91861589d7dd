"""What a backend sees of a batch and of the KV pool.

Shapes: T tokens, B rows, P pages, S page_size, K kv heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from .spec import Phase

__all__ = ["BatchLike", "BatchView", "KVPool", "StepOutput"]


@dataclass(slots=True)
class BatchView:
    """The lengths and pages of one batch, built once per batch by the core. All device tensors are int32.

    In a captured batch the host fields are None, ``max_kv`` is the largest length the graph may meet, and the device
    tensors have fixed addresses: their contents are derived again inside each replay. Padded rows are included; they
    have ``kv_len`` 1 and their pages are the dummy page.
    """

    q_lens_host: tuple[int, ...] | None
    """(B,) new tokens per row; 1 everywhere in decode."""
    kv_lens_host: tuple[int, ...] | None
    """(B,) tokens with KV after this pass's store."""
    max_q: int
    max_kv: int
    cu_q_device: torch.Tensor
    """(B+1,) prefix sum of the q lengths."""
    kv_lens_device: torch.Tensor
    """(B,)"""
    page_ids_device: torch.Tensor
    """(B, P) the page of every S-th token; entries past the live length name the dummy page. The engine derives it when
    it is first read, so a backend that can do with :meth:`slot_table` should.
    """
    page_size: int
    page_table_device: torch.Tensor | None = None
    """(R, L) the engine's page table, whole: by ``table_idx`` and position, the slot of each token. What it says past a
    row's length means nothing. None in views that were made without an engine: see :meth:`slot_table`.
    """
    table_idx_device: torch.Tensor | None = None
    """(B,) the row of ``page_table_device`` of each row of the batch"""

    def slot_table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(table (R, L), table_idx (B,))``: row b's token at position i is in slot ``table[table_idx[b], i]``.

        In the engine these are the page table and the rows as they are, at no cost; elsewhere they are derived from
        the page ids, by device operations.
        """
        import torch

        if self.page_table_device is not None and self.table_idx_device is not None:
            return self.page_table_device, self.table_idx_device
        ids = self.page_ids_device
        within = torch.arange(self.page_size, dtype=ids.dtype, device=ids.device)
        table = (ids[:, :, None] * self.page_size + within).flatten(1)
        return table, torch.arange(ids.shape[0], dtype=ids.dtype, device=ids.device)

    def flat_page_ids_device(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(indptr (B+1), page ids (sum of pages), length of each row's last page (B))``, int32, built on request.

        Needs host lengths, so it is for eager batches and host plans only.
        """
        import torch

        if self.kv_lens_host is None:
            raise ValueError("flat page ids need host lengths: this batch is captured")
        # The host only says how many pages there are: nothing is uploaded, nothing waits.
        total = sum(-(-n // self.page_size) for n in self.kv_lens_host)
        lens, device = self.kv_lens_device, self.kv_lens_device.device
        counts = (lens + (self.page_size - 1)) // self.page_size
        indptr = lens.new_zeros(len(lens) + 1)
        torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
        rows = torch.repeat_interleave(torch.arange(len(lens), device=device), counts, output_size=total)
        flat = self.page_ids_device[rows, torch.arange(total, device=device) - indptr[rows]]
        return indptr, flat, lens - (counts - 1) * self.page_size


@dataclass(slots=True)
class StepOutput:
    """What one step of the engine leaves on the device."""

    logits: torch.Tensor
    """(B, V) float32 or model dtype, one row per Req (padded rows included)."""
    next_tokens: torch.Tensor
    """(B,) int32"""


class KVPool(Protocol):
    """The paged key and value cache of one rank."""

    page_size: int
    num_pages: int
    """Pages that can be allocated; one more, the dummy page, is at index ``num_pages``."""
    layout: str
    """``"NHD"``: a page is (S, K, D)."""

    def k_cache(self, layer: int) -> torch.Tensor:
        """(P + 1, S, K, D)"""
        ...

    def v_cache(self, layer: int) -> torch.Tensor:
        """(P + 1, S, K, D)"""
        ...


class BatchLike(Protocol):
    """The part of a batch that backends may use."""

    phase: Phase
    view: BatchView
    scratch: dict[str, Any]
    """A backend's own per-batch state."""
    captured: bool
    """True while the batch belongs to a graph: host lengths are unknown and addresses are fixed."""
    positions: torch.Tensor
    """(T,) int32"""
    out_loc: torch.Tensor
    """(T,) int32 slots this pass writes"""
    padded_size: int
    """Rows, padding included; graph runners set it."""
    mode: Any
    """The batch's ``SamplingMode``."""

    @property
    def size(self) -> int:
        """Real rows."""
        ...
