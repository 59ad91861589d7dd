"""The device's own record of every running sequence, so that a steady decode step needs nothing from the host.

R rows = ``max_running_req`` + 1: a Req's row is its ``table_idx``, the last row is the dummy that padding uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from minisgl_core.errors import ConfigError

from .upload import PackedUpload

if TYPE_CHECKING:
    from minisgl_core.core import Batch, Req, SamplingParams
    from minisgl_core.plugin_api import Platform

__all__ = ["DecodeState", "PrefillInputs", "pack_params"]

PARAM_COLUMNS = 6
"""temperature, top_k, top_p, min_p, seed_lo, seed_hi"""


class PrefillInputs(NamedTuple):
    """What the host knows of a prefill pass, on the device: int32."""

    rows: torch.Tensor
    """(B,)"""
    cached: torch.Tensor
    """(B,) tokens with KV before this pass"""
    q_lens: torch.Tensor
    """(B,)"""
    cu_q: torch.Tensor
    """(B+1,)"""
    input_ids: torch.Tensor
    """(T,)"""


class DecodeState:
    """Fixed-address device tensors, the changes staged for them, and the host's mirror of what they hold."""

    def __init__(
        self, platform: Platform, max_running_req: int, width: int, page_size: int, dummy_slot: int, max_tokens: int
    ) -> None:
        device, rows = platform.device, max_running_req + 1
        self.dummy_row = max_running_req
        self.width = width
        self.page_table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.page_table[self.dummy_row] = dummy_slot + torch.arange(width, device=device) % page_size
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        """(R,) tokens with KV, which is the position of ``last_token``"""
        self.last_token = torch.zeros(rows, dtype=torch.int32, device=device)
        """(R,) the token that the next decode step reads"""
        self.params = torch.zeros(rows, PARAM_COLUMNS, dtype=torch.int32, device=device)
        self.params[:, 2] = float_bits(1.0)
        self.rows = torch.full((rows,), self.dummy_row, dtype=torch.int32, device=device)
        """The decode batch: its Reqs' rows, then padding."""
        self.iota = torch.arange(max(rows, 2) + 1, dtype=torch.int32, device=device)
        self._upload = PackedUpload(platform, capacity=max(1 << 16, 4 * max_tokens + 16 * rows))
        self._slots: list[tuple[int, np.ndarray]] = []
        self._params: dict[int, np.ndarray] = {}
        self._resume: dict[int, tuple[int, int]] = {}
        self._on_device: list[int] = []
        self._on_device_array = np.empty(0, dtype=np.int32)
        self._lengths_host = np.zeros(rows, dtype=np.int64)
        self._decode_reqs: list[Req] = []
        self._slots_host = np.full((rows, width), -1, dtype=np.int32)

    # Staging: called by the scheduler and the sampler, nothing moves yet.

    def set_slots(self, table_idx: int, start: int, slots: np.ndarray) -> None:
        """Positions ``start ..`` of a row live in these slots (int32)."""
        self._slots.append((table_idx * self.width + start, slots))
        self._slots_host[table_idx, start : start + len(slots)] = slots

    def set_params(self, table_idx: int, params: SamplingParams, seed: int) -> None:
        """The row samples like this from its next step on; ``seed`` is taken modulo 2**64."""
        self._params[table_idx] = pack_params(params, seed)

    # Uploading: once per pass, by the engine.

    def upload_decode(self, batch: Batch) -> None:
        """Make the device agree with the host about a decode batch; in a steady step there is nothing to do."""
        rows = [req.table_idx for req in batch.reqs]
        rows.extend([self.dummy_row] * (batch.padded_size - len(rows)))
        if rows != self._on_device or batch.reqs != self._decode_reqs:
            self._resync(batch.reqs)
            self._send([np.array(rows, dtype=np.int32)], rows)
        elif self._slots or self._params:
            self._send([], rows)
        batch.rows = self.rows[: batch.padded_size]

    def upload_prefill(self, batch: Batch) -> PrefillInputs:
        """Send a prefill pass's lengths and, unless set by hand, its tokens."""
        rows = np.array([req.table_idx for req in batch.reqs], dtype=np.int32)
        cached = np.array([req.cached_len for req in batch.reqs], dtype=np.int32)
        q_lens = np.array([req.extend_len for req in batch.reqs], dtype=np.int32)
        cu_q = np.concatenate(([0], np.cumsum(q_lens))).astype(np.int32)
        if batch.input_ids is None:
            tokens = np.concatenate([req.tokens[req.cached_len : req.device_len] for req in batch.reqs])
        else:
            tokens = np.empty(0, dtype=np.int32)
        self._check_room(tokens.size + 4 * len(rows))
        sent = PrefillInputs(*self._send([rows, cached, q_lens, cu_q, tokens]))
        self._lengths_host[rows] = cached + q_lens
        batch.rows = sent.rows
        return sent

    def _check_room(self, size: int) -> None:
        room = self._upload.capacity - 8 * self.iota.numel()
        if size > room:
            raise ConfigError(
                f"a prefill pass of {size} numbers exceeds the upload buffer's {room}",
                field="max_prefill_tokens",
                value=size,
                remedy="cut the prompt into chunks or raise `max_prefill_tokens`",
            )

    def _resync(self, reqs: list[Req]) -> None:
        """Rows whose device length is not the Req's (driven by hand, or restored) are set from the host."""
        cached = np.array([req.cached_len for req in reqs], dtype=np.int64)
        known = self._lengths_host[[req.table_idx for req in reqs]]
        for at in np.flatnonzero(known != cached):
            req = reqs[at]
            if req.num_tokens > req.cached_len:
                self._resume[req.table_idx] = (req.cached_len, int(req.tokens[req.cached_len]))
                self._lengths_host[req.table_idx] = req.cached_len
        self._decode_reqs = list(reqs)

    def _send(self, parts: list[np.ndarray], rows: list[int] | None = None) -> list[torch.Tensor]:
        """Flush what is staged together with ``parts``; ``rows``: the decode batch if parts[0] holds a new one."""
        staged, fixed = self._take_staged(), sum(part.size for part in parts)
        while staged[0].size and 2 * staged[0].size + fixed + 8 * self.iota.numel() > self._upload.capacity:
            room = self._upload.capacity // 2
            index, slots = self._upload.send([staged[0][:room], staged[1][:room]])
            self.page_table.view(-1).index_put_((index,), slots)
            staged[0], staged[1] = staged[0][room:], staged[1][room:]
        sent = self._upload.send([*staged, *parts])
        self._apply(sent[: len(staged)])
        sent = sent[len(staged) :]
        if rows is not None and parts:
            self.rows[: len(rows)].copy_(sent[0])
            self._on_device, self._on_device_array = rows, parts[0]
        return sent

    def _take_staged(self) -> list[np.ndarray]:
        """[slot index, slot, param row, params, resumed row, its length, its token]"""
        if self._slots:
            index = np.concatenate([np.arange(at, at + len(slots), dtype=np.int32) for at, slots in self._slots])
            slots = np.concatenate([slots for _, slots in self._slots])
        else:
            index = slots = np.empty(0, dtype=np.int32)
        params = np.array(list(self._params.values()), dtype=np.int32).reshape(-1)
        resumed = np.array(list(self._resume.values()), dtype=np.int32).reshape(-1, 2)
        staged = [
            index,
            slots,
            np.array(list(self._params), dtype=np.int32),
            params,
            np.array(list(self._resume), dtype=np.int32),
            resumed[:, 0],
            resumed[:, 1],
        ]
        self._slots, self._params, self._resume = [], {}, {}
        return staged

    def _apply(self, sent: list[torch.Tensor]) -> None:
        index, slots, param_rows, params, resumed, lengths, tokens = sent
        if index.numel():
            self.page_table.view(-1).index_put_((index,), slots)
        if param_rows.numel():
            self.params.index_put_((param_rows,), params.view(-1, PARAM_COLUMNS))
        if resumed.numel():
            self.lengths.index_put_((resumed,), lengths)
            self.last_token.index_put_((resumed,), tokens)

    def set_by_hand(self, batch: Batch) -> None:
        """Decode inputs that the caller set on the Batch win: write them where the step will read them."""
        assert batch.rows is not None
        rows, device = batch.rows[: batch.size], self.lengths.device
        if batch.positions is not None:
            self.lengths.index_put_((rows,), batch.positions[: batch.size].to(device, torch.int32))
        if batch.input_ids is not None:
            self.last_token.index_put_((rows,), batch.input_ids[: batch.size].to(device, torch.int32))
        if batch.out_loc is not None:
            slots = batch.out_loc[: batch.size].to(device, torch.int32)
            self.page_table.index_put_((rows, self.lengths[rows]), slots)

    # Device work, inside the step.

    def write_back(self, rows: torch.Tensor, kv_lens: torch.Tensor, next_tokens: torch.Tensor) -> None:
        """The step is done: every row has ``kv_lens`` tokens in the pool, and its next token is known."""
        self.lengths.index_put_((rows,), kv_lens)
        # -1 marks a row whose logits were NaN: the id must stay a valid index until the host has heard of it.
        self.last_token.index_put_((rows,), next_tokens.clamp(min=0))
        self.lengths[self.dummy_row].zero_()
        self.last_token[self.dummy_row].zero_()

    def advance_host(self, batch: Batch) -> None:
        """Mirror on the host what :meth:`write_back` does to the lengths of a decode batch."""
        self._lengths_host[self._on_device_array[: batch.size]] += 1

    def forget_rows(self) -> None:
        """``rows`` was written from elsewhere: the next decode batch must be sent whole."""
        self._on_device, self._decode_reqs = [], []

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


def pack_params(params: SamplingParams, seed: int) -> np.ndarray:
    """A row of ``DecodeState.params``: (PARAM_COLUMNS,) int32, floats as their bits."""
    seed %= 2**64
    low, high = np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32).view(np.int32)
    temperature = 0.0 if params.is_greedy else params.temperature
    top_k = max(params.top_k, 0)
    row = [float_bits(temperature), top_k, float_bits(params.top_p), float_bits(params.min_p), low, high]
    return np.array(row, dtype=np.int32)


def float_bits(value: float) -> int:
    """A float32's bits as int32, so that it can travel among integers."""
    return int(np.array([value], dtype=np.float32).view(np.int32)[0])
