"""The record of every running sequence on the device, so that a steady decode step needs nothing from the host.

R rows = ``max_running_req`` + 1: a Req's row is its ``table_idx``, the last row is the dummy that padding uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from minisgl_core.errors import ConfigError
from minisgl_core.kvcache import run_places
from minisgl_core.plugin_api import PinnedRing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minisgl_core.core import Batch, Req
    from minisgl_core.plugin_api import Platform

__all__ = ["DecodeState", "PackedUpload", "PrefillInputs"]


class PackedUpload:
    """Packs int32 arrays into a pinned buffer, copies them once, and hands back device views of each.

    The views stay valid until the next :meth:`send`, in stream order.
    """

    def __init__(self, platform: Platform, capacity: int, depth: int = 3) -> None:
        self.capacity = capacity
        self._ring = PinnedRing(platform, (capacity,), torch.int32, depth)
        self._staging = torch.zeros(capacity, dtype=torch.int32, device=platform.device)
        self._sizes: list[int] = []
        """Sizes of the parts that were sent last"""

    def send(self, parts: list[np.ndarray]) -> list[torch.Tensor]:
        """Flat int32 arrays, together at most ``capacity`` numbers -> their device views, in order."""
        self._sizes = sizes = [part.size for part in parts]
        total = sum(sizes)
        sent = self._staging[:total]
        with self._ring.borrow() as buffer:
            pinned = buffer[:total]
            np.concatenate(parts, out=pinned.numpy())
            sent.copy_(pinned, non_blocking=True)
        return list(sent.split(sizes)) if len(sizes) > 1 else [sent]

    def last_parts(self, count: int) -> list[torch.Tensor]:
        """Copies, made in one operation, of the last ``count`` parts that were sent: later uploads leave them alone."""
        sizes, end = self._sizes[-count:], sum(self._sizes)
        return list(self._staging[end - sum(sizes) : end].clone().split(sizes))


class PrefillInputs(NamedTuple):
    """The inputs of a prefill pass, computed on the host, on the device: int32. They are the pass's own memory."""

    rows: torch.Tensor
    """(B,)"""
    kv_lens: torch.Tensor
    """(B,) tokens with KV after this pass"""
    last_rows: torch.Tensor
    """(B,) each row's last token in the pass"""
    cu_q: torch.Tensor
    """(B+1,)"""
    positions: torch.Tensor
    """(T,)"""
    places: torch.Tensor
    """(T,) of the tokens in the flat page table"""
    input_ids: torch.Tensor
    """(T,), or (0,) where they are set by hand"""


class DecodeState:
    """Fixed-address device tensors, the changes staged for them, and the host's mirror of what they hold."""

    def __init__(
        self,
        platform: Platform,
        max_running_req: int,
        width: int,
        page_size: int,
        dummy_slot: int,
        max_tokens: int,
        params: np.ndarray,
    ) -> None:
        """``params`` (C,) int32: what a row of sampling parameters holds before it is set."""
        device, rows = platform.device, max_running_req + 1
        self.dummy_row = max_running_req
        self.width = width
        self.page_table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.page_table[self.dummy_row] = dummy_slot + torch.arange(width, device=device) % page_size
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        """(R,) tokens with KV, which is the position of ``last_token``"""
        self.last_token = torch.zeros(rows, dtype=torch.int32, device=device)
        """(R,) the token that the next decode step reads"""
        self.params = torch.from_numpy(np.tile(params, (rows, 1))).to(device)
        """(R, C) packed by the sampler, which reads them in the step"""
        self.rows = torch.full((rows,), self.dummy_row, dtype=torch.int32, device=device)
        """The decode batch: its Reqs' rows, then padding."""
        self.iota = torch.arange(max(rows, 2) + 1, dtype=torch.int32, device=device)
        self._upload = PackedUpload(platform, capacity=max(1 << 16, 6 * max_tokens + 16 * rows + 64))
        self._room = self._upload.capacity - (1 + params.size + 1 + 2) * rows
        """Numbers that an upload can hold when all rows have parameters staged and are resumed in it"""
        self._slots: list[tuple[np.ndarray, np.ndarray]] = []
        self._params: dict[int, np.ndarray] = {}
        self._resume: dict[int, tuple[int, int]] = {}
        self._on_device = np.empty(0, dtype=np.int32)
        """What ``rows`` holds for the present decode batch, padding included."""
        self._lengths_host = np.zeros(rows, dtype=np.int64)
        self._decode_reqs: list[Req] = []
        self._decode_idx: np.ndarray | None = None
        """``Batch.table_idx`` of the present decode batch, if it has one."""
        self._slots_host = np.full((rows, width), -1, dtype=np.int32)

    # Staging: called by the scheduler and the sampler, nothing moves yet.

    def set_slots(self, table_idx: int, start: int, slots: np.ndarray) -> None:
        """Positions ``start ..`` of a row live in these slots (int32)."""
        first = table_idx * self.width + start
        self._stage_slots(np.arange(first, first + len(slots)), slots)

    def extend_slots(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, slots: np.ndarray) -> None:
        """:meth:`set_slots` for many rows (N,): each has ``counts[i]`` of ``slots``, row after row."""
        self._stage_slots(run_places(rows * self.width + starts, counts), slots)

    def _stage_slots(self, places: np.ndarray, slots: np.ndarray) -> None:
        """``places`` (N,) int64 in the flat page table."""
        self._slots.append((places.astype(np.int32), slots))
        self._slots_host.reshape(-1)[places] = slots

    def set_params(self, table_idx: int, packed: np.ndarray) -> None:
        """The row samples with these parameters (C,) int32 from its next step on."""
        self._params[table_idx] = packed

    # Uploading: once per pass, by the engine.

    def upload_decode(self, batch: Batch) -> None:
        """Make the device agree with the host about a decode batch; in a steady step nothing is sent."""
        if self._is_new(batch):
            self._upload_rows(batch)
        else:
            self._flush()
        if batch.rows is None:
            batch.rows = self.rows[: batch.padded_size]

    def refresh(self, batch: Batch) -> None:
        """Before the pass of a batch that was prepared by hand: since then its parameters may have been staged, and
        another batch been prepared.
        """
        if batch.is_decode:
            self.upload_decode(batch)
        else:
            self._flush()

    def _flush(self) -> None:
        if self._slots or self._params:
            self.send([])

    def _is_new(self, batch: Batch) -> bool:
        """Does it differ from the decode batch before?"""
        if batch.padded_size != len(self._on_device):
            return True
        if batch.table_idx is not None and batch.table_idx is self._decode_idx:
            return False
        rows = batch.rows_host()
        if batch.reqs != self._decode_reqs or not np.array_equal(rows, self._on_device[: batch.size]):
            return True
        return not np.array_equal(self._lengths_host[rows], batch.cached_lens())

    def _upload_rows(self, batch: Batch) -> None:
        rows = np.full(batch.padded_size, self.dummy_row, dtype=np.int32)
        rows[: batch.size] = batch.rows_host()
        self._resync(batch)
        (sent,) = self.send([rows])
        batch.rows = self.rows[: batch.padded_size]
        batch.rows.copy_(sent)
        self._on_device, self._decode_reqs, self._decode_idx = rows, list(batch.reqs), batch.table_idx

    def upload_prefill(self, batch: Batch) -> PrefillInputs:
        """Send a prefill pass's lengths and, unless set by hand, its tokens."""
        rows, cached, device = batch.rows_host(), batch.cached_lens(), batch.device_lens()
        q_lens = device - cached
        cu_q = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(q_lens, out=cu_q[1:])
        positions = np.arange(cu_q[-1]) + np.repeat(cached - cu_q[:-1], q_lens)
        places = positions + np.repeat(rows * self.width, q_lens)
        if batch.input_ids is None:
            tokens = np.concatenate([req.tokens[req.cached_len : req.device_len] for req in batch.reqs])
        else:
            tokens = np.empty(0, dtype=np.int32)
        given = (rows, device, cu_q[1:] - 1, cu_q, positions, places, tokens)
        # Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for a pointer that does not.
        parts = [np.resize(part, part.size + -part.size % 4).astype(np.int32) for part in given]
        self._check_room(sum(part.size for part in parts))
        self.send(parts)
        sizes = [part.size for part in given]
        kept = self._upload.last_parts(len(parts))
        sent = PrefillInputs(*(part[:size] for part, size in zip(kept, sizes, strict=True)))
        self._lengths_host[rows] = device
        batch.rows = sent.rows
        return sent

    def _check_room(self, size: int) -> None:
        if size > self._room:
            raise ConfigError(
                f"a prefill pass of {size} numbers exceeds the upload buffer's {self._room}",
                field="max_prefill_tokens",
                value=size,
                remedy="cut the prompt into chunks or raise `max_prefill_tokens`",
            )

    def _resync(self, batch: Batch) -> None:
        """Rows whose device length is not the Req's (driven by hand, or restored) are set from the host."""
        for at in np.flatnonzero(self._lengths_host[batch.rows_host()] != batch.cached_lens()):
            req = batch.reqs[at]
            if req.num_tokens > req.cached_len:
                self._resume[req.table_idx] = (req.cached_len, int(req.tokens[req.cached_len]))
                self._lengths_host[req.table_idx] = req.cached_len

    def send(self, parts: list[np.ndarray]) -> list[torch.Tensor]:
        """Flush what is staged together with ``parts``, int32; returns these on the device, until the next upload."""
        slots, params, resumed = self._take_slots(sum(part.size for part in parts)), self._params, self._resume
        self._params, self._resume = {}, {}
        staged = [
            *slots,
            *_columns(params),
            *_columns(resumed),
        ]
        sent = self._upload.send([*staged, *parts])
        own = iter(sent)
        if slots:
            self.page_table.view(-1).index_put_((next(own),), next(own))
        if params:
            self.params.index_put_((next(own),), next(own).view(-1, self.params.shape[1]))
        if resumed:
            rows, values = next(own), next(own).view(-1, 2)
            self.lengths.index_put_((rows,), values[:, 0])
            self.last_token.index_put_((rows,), values[:, 1])
        return sent[len(staged) :]

    def _take_slots(self, others: int) -> list[np.ndarray]:
        """[place in the flat page table, slot] of what is staged, or nothing; what does not fit with ``others``
        numbers is sent at once.
        """
        if not self._slots:
            return []
        places = np.concatenate([places for places, _ in self._slots])
        slots = np.concatenate([slots for _, slots in self._slots])
        self._slots = []
        while 2 * places.size + others > self._room:
            room = self._upload.capacity // 2
            sent = self._upload.send([places[:room], slots[:room]])
            self.page_table.view(-1).index_put_((sent[0],), sent[1])
            places, slots = places[room:], slots[room:]
        return [places, slots]

    def overwrite(
        self,
        batch: Batch,
        positions: torch.Tensor | None,
        input_ids: torch.Tensor | None,
        out_loc: torch.Tensor | None,
    ) -> None:
        """Write a decode batch's inputs, (B,) int32 each, where the step will read them; None = leave them."""
        assert batch.rows is not None
        rows = batch.rows[: batch.size]
        if positions is not None:
            self.lengths.index_put_((rows,), positions)
        if input_ids is not None:
            self.last_token.index_put_((rows,), input_ids)
        if out_loc is not None:
            self.page_table.index_put_((rows, self.lengths[rows]), out_loc)

    # Device work, inside the step.

    def write_back(self, rows: torch.Tensor, kv_lens: torch.Tensor, next_tokens: torch.Tensor) -> None:
        """The step is done: every row has ``kv_lens`` tokens in the pool, and its next token is known."""
        index = rows.long()
        self.lengths.index_put_((index,), kv_lens)
        # -1 marks a row whose logits were NaN: the id must stay a valid index until the host has processed it.
        self.last_token.index_put_((index,), next_tokens.clamp(min=0))
        self.lengths[self.dummy_row].zero_()
        self.last_token[self.dummy_row].zero_()

    def advance_host(self, batch: Batch) -> None:
        """Mirror on the host what :meth:`write_back` does to the lengths of a decode batch."""
        self._lengths_host[batch.rows_host()] += 1

    def forget_rows(self) -> None:
        """``rows`` was written from elsewhere: the next decode batch must be sent whole."""
        self._on_device, self._decode_reqs, self._decode_idx = self._on_device[:0], [], None

    @property
    def has_run(self) -> bool:
        """Has any row had a pass?"""
        return bool(self._lengths_host.any())

    def host_length(self, table_idx: int) -> int:
        """The mirrored length of a row."""
        return int(self._lengths_host[table_idx])

    def host_slots(self, table_idx: int, length: int) -> np.ndarray:
        """(length,) the slots that :meth:`set_slots` gave a row's first positions; -1 where it never did."""
        return self._slots_host[table_idx, :length]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every fixed buffer that a decode step reads, by name."""
        return {
            "DecodeState.rows": self.rows,
            "DecodeState.lengths": self.lengths,
            "DecodeState.last_token": self.last_token,
            "DecodeState.page_table": self.page_table,
            "DecodeState.params": self.params,
        }

    def close(self) -> None:
        """Drop all memory but this record itself, which a scheduler may still refer to."""
        empty = torch.empty(0, dtype=torch.int32)
        self.page_table = self.lengths = self.last_token = self.params = self.rows = self.iota = empty
        self._slots_host = np.empty((0, 0), dtype=np.int32)
        del self._upload


def _columns(staged: Mapping[int, Any]) -> list[np.ndarray]:
    """[rows, their values one after the other] as flat int32 arrays, or nothing."""
    if not staged:
        return []
    return [np.array(list(staged), dtype=np.int32), np.array(list(staged.values()), dtype=np.int32).reshape(-1)]
