"""What a pass reads, derived from the device state: token ids, positions, slots and the view that backends get.

Derived on the device, inside the step where that is captured. Shapes: T tokens, B rows (padding included), P pages of a
row, S page_size, L width of the page table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from minisgl_core.errors import ConfigError
from minisgl_core.plugin_api import BatchView

from .scoring import find_scored

if TYPE_CHECKING:
    from minisgl_core.core import Batch

    from .state import DecodeState, PrefillInputs

__all__ = ["BatchInputs", "DerivedView"]

Lengths = torch.Tensor | Callable[[], torch.Tensor]
Pages = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]
"""A function of the lengths: one that read them from the view would hold it, and keep the device's memory."""


class DerivedView(BatchView):
    """A view whose ``kv_lens_device`` and ``page_ids_device`` may be functions, which are called once, at first use.
    The one of the page ids gets the lengths.

    In a captured step the first use, and so the call, is inside the capture.
    """

    __slots__ = ("_kv_lens", "_page_ids")

    _kv_lens: Lengths
    _page_ids: Pages

    def __init__(
        self,
        q_lens_host: tuple[int, ...] | None,
        kv_lens_host: tuple[int, ...] | None,
        max_q: int,
        max_kv: int,
        cu_q_device: torch.Tensor,
        kv_lens_device: Lengths,
        page_ids_device: Pages,
        page_size: int,
        page_table_device: torch.Tensor | None = None,
        table_idx_device: torch.Tensor | None = None,
    ) -> None:
        lens, ids = cast("torch.Tensor", kv_lens_device), cast("torch.Tensor", page_ids_device)
        super().__init__(
            q_lens_host, kv_lens_host, max_q, max_kv, cu_q_device, lens, ids, page_size, page_table_device,
            table_idx_device,
        )  # fmt: skip

    @property
    def kv_lens_device(self) -> torch.Tensor:
        """(B,)"""
        if not isinstance(self._kv_lens, torch.Tensor):
            self._kv_lens = self._kv_lens()
        return self._kv_lens

    @kv_lens_device.setter
    def kv_lens_device(self, value: Lengths) -> None:
        self._kv_lens = value

    @property
    def page_ids_device(self) -> torch.Tensor:
        """(B, P)"""
        if not isinstance(self._page_ids, torch.Tensor):
            self._page_ids = self._page_ids(self.kv_lens_device)
        return self._page_ids

    @page_ids_device.setter
    def page_ids_device(self, value: Pages) -> None:
        self._page_ids = value


class HandSet(NamedTuple):
    """Copies of the inputs that a caller set on a Batch, on the device: int32 (T,), None where it set nothing."""

    positions: torch.Tensor | None
    input_ids: torch.Tensor | None
    out_loc: torch.Tensor | None

    @classmethod
    def of(cls, batch: Batch, tokens: int, device: torch.device) -> HandSet:
        """The first ``tokens`` of each. Raises :class:`ConfigError` for a field that has fewer."""
        return cls(*(_copied(name, getattr(batch, name), tokens, device) for name in cls._fields))


def _copied(name: str, given: torch.Tensor | None, tokens: int, device: torch.device) -> torch.Tensor | None:
    if given is None:
        return None
    if given.dim() != 1 or len(given) < tokens:
        raise ConfigError(
            f"`Batch.{name}` has shape {list(given.shape)}, the pass has {tokens} tokens",
            field=name,
            value=list(given.shape),
            remedy=f"set a tensor of shape [{tokens}], or leave it None",
        )
    return given[:tokens].to(device, torch.int32, copy=True)


class BatchInputs:
    """Sets ``rows``, ``positions``, ``input_ids``, ``out_loc`` and ``view`` of a batch.

    Fields that the caller set win: they are written to the device state first.
    """

    def __init__(self, state: DecodeState, max_seq_len: int, dummy_slot: int) -> None:
        self._state, self._max_seq_len, self._dummy_slot = state, max_seq_len, dummy_slot

    def prepare(self, batch: Batch, page_size: int) -> None:
        """Upload what changed, then derive everything; ``page_size``: of the backend that will serve the batch."""
        if batch.is_prefill:
            self._prepare_prefill(batch, page_size)
        else:
            self.upload_decode(batch)
            self.derive_decode(batch, page_size, _lens_host(batch))

    # Decode: the device has everything but the rows of the batch.

    def upload_decode(self, batch: Batch) -> None:
        """Make the device agree with the host, and with what the caller set on the batch."""
        if batch.positions is None and batch.input_ids is None and batch.out_loc is None:
            self._state.upload_decode(batch)
            return
        # Copied before anything is uploaded: they may be views of what the upload and the caller's other fields change.
        by_hand = HandSet.of(batch, batch.size, self._state.lengths.device)
        self._state.upload_decode(batch)
        self._state.overwrite(batch, *by_hand)

    def derive_decode(self, batch: Batch, page_size: int, lens_host: tuple[int, ...] | None) -> None:
        """Device operations alone. ``lens_host`` (B,) with the new token; None where the batch is captured."""
        state, rows = self._state, batch.rows
        assert rows is not None
        # index_select, unlike indexing, takes int32 as it is.
        batch.positions = positions = state.lengths.index_select(0, rows)
        batch.input_ids = state.last_token.index_select(0, rows)
        places = torch.add(positions, rows, alpha=state.width)
        batch.out_loc = state.page_table.view(-1).index_select(0, places)
        batch.last_rows = None
        batch.view = self._decode_view(batch, page_size, lens_host, positions + 1)

    def view_for_replay(self, batch: Batch, page_size: int) -> BatchView:
        """The view of a decode batch whose inputs the replay derives; its tensors are made at first use."""
        state, rows = self._state, batch.rows
        assert rows is not None
        return self._decode_view(batch, page_size, _lens_host(batch), lambda: state.lengths.index_select(0, rows) + 1)

    def _decode_view(
        self, batch: Batch, page_size: int, lens_host: tuple[int, ...] | None, kv_lens: Lengths
    ) -> BatchView:
        state, rows = self._state, batch.rows
        assert rows is not None
        max_kv = self._max_seq_len if lens_host is None else max(lens_host)
        return DerivedView(
            None if lens_host is None else (1,) * batch.padded_size,
            lens_host,
            1,
            max_kv,
            state.iota[: batch.padded_size + 1],
            kv_lens,
            lambda lens: self._page_ids(rows, lens, max_kv, page_size),
            page_size,
            state.page_table,
            rows,
        )

    # Prefill: the host computes what the device cannot know.

    def _prepare_prefill(self, batch: Batch, page_size: int) -> None:
        state, device_lens = self._state, batch.device_lens()
        q_lens_host: tuple[int, ...] = tuple((device_lens - batch.cached_lens()).tolist())
        # Copied before the upload: they may be views of what this pass or one that is prepared after it changes.
        by_hand = HandSet.of(batch, sum(q_lens_host), state.lengths.device)
        sent = state.upload_prefill(batch)
        rows = sent.rows
        self._set_prefill_inputs(batch, sent, by_hand)
        kv_lens_host: tuple[int, ...] = tuple(device_lens.tolist())
        max_kv = max(kv_lens_host)
        batch.view = DerivedView(
            q_lens_host,
            kv_lens_host,
            max(q_lens_host),
            max_kv,
            sent.cu_q,
            sent.kv_lens,
            lambda lens: self._page_ids(rows, lens, max_kv, page_size),
            page_size,
            state.page_table,
            rows,
        )
        if any(req.sampling_params.prompt_logprobs is not None for req in batch.reqs):
            batch.scored = find_scored(batch, state)  # last: its upload ends the life of what was sent before
        else:
            batch.scored = None

    def _set_prefill_inputs(self, batch: Batch, sent: PrefillInputs, by_hand: HandSet) -> None:
        table, places = self._state.page_table.view(-1), sent.places
        if by_hand.positions is not None:
            places = places + (by_hand.positions - sent.positions)
        batch.rows = sent.rows
        batch.positions = sent.positions if by_hand.positions is None else by_hand.positions
        batch.input_ids = sent.input_ids if by_hand.input_ids is None else by_hand.input_ids
        if by_hand.out_loc is None:
            batch.out_loc = table.index_select(0, places)
        else:
            batch.out_loc = by_hand.out_loc
            table.index_put_((places,), by_hand.out_loc)
        batch.last_rows = sent.last_rows.to(torch.int64)

    # Pages.

    def view_in_pages(self, batch: Batch, page_size: int) -> BatchView:
        """The view of an eager batch, its pages counted in another size; its other tensors are shared."""
        view, rows = batch.view, batch.rows
        assert view is not None and rows is not None
        ids = self._page_ids(rows, view.kv_lens_device, view.max_kv, page_size)
        return replace(view, page_ids_device=ids, page_size=page_size)

    def _page_ids(self, rows: torch.Tensor, kv_lens: torch.Tensor, max_kv: int, size: int) -> torch.Tensor:
        """(B, P): the page of every S-th position below each row's length, the dummy page after it."""
        pages = -(-max_kv // size)
        slots = self._state.page_table[:, : pages * size : size].index_select(0, rows)
        ids = slots if size == 1 else slots.floor_divide_(size)
        starts = torch.arange(0, pages * size, size, dtype=torch.int32, device=kv_lens.device)
        return ids.masked_fill_(starts[None, :] >= kv_lens[:, None], self._dummy_slot // size)


def _lens_host(batch: Batch) -> tuple[int, ...]:
    """(B,) of a decode batch: each row's length with its new token, 1 for padding"""
    return (*batch.device_lens().tolist(), *(1,) * (batch.padded_size - batch.size))
