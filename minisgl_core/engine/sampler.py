"""From logits to tokens: inside the step where possible, after it where a request changes or reads its logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from minisgl_core.plugin_api import SampleArgs

from .config import SAMPLING_MODES
from .logits_processors import RowProcessor
from .logprobs import LogprobRows, read_logprobs, to_host
from .scoring import PromptScores, score

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from minisgl_core.core import Batch, Req, SamplingParams
    from minisgl_core.plugin_api import LayerOps, SamplingMode

    from .logits_processors import LogitsProcessor
    from .state import DecodeState

__all__ = ["Sampler", "pack_params"]


class Sampler:
    """Keeps each row's parameters on the device current, and runs the ``sample`` operation."""

    def __init__(self, ops: LayerOps, state: DecodeState, processor: LogitsProcessor, seed: int) -> None:
        self._ops, self._state, self._processor, self._seed = ops, state, processor, seed
        self._row_params: list[SamplingParams | None] = [None] * (state.dummy_row + 1)
        self._row_seed = [0] * (state.dummy_row + 1)
        self._row_req = np.full(state.dummy_row + 1, None, dtype=object)
        self._row_postprocess = np.zeros(state.dummy_row + 1, dtype=bool)
        """Whether the row's logits are changed or read after the step. By what, and how many, is in the next lists."""
        self._row_processor: list[RowProcessor | None] = [None] * (state.dummy_row + 1)
        self._ban_until = np.zeros(state.dummy_row + 1, dtype=np.int64)
        """Tokens of the row's Req after which it may end; 0 where it may end at any time"""
        self._row_logprobs = np.full(state.dummy_row + 1, -1, dtype=np.int64)
        """-1 = none"""
        self._row_mode = np.zeros(state.dummy_row + 1, dtype=np.int8)
        self._seen: np.ndarray | None = None
        """``Batch.table_idx`` of the batch prepared last."""
        self._mode: SamplingMode = "greedy"
        self._postprocess = False

    def prepare(self, batch: Batch) -> SamplingMode:
        """Prepare the upload of parameters for rows with a new Req; returns the cheapest mode that serves all rows."""
        if batch.table_idx is None or batch.table_idx is not self._seen:
            rows = batch.rows_host()
            owners = self._row_req[rows].tolist()
            if owners != batch.reqs:
                for req, owner in zip(batch.reqs, owners, strict=True):
                    if owner is not req:
                        self._claim(req, req.table_idx)
            self._seen = batch.table_idx
            self._mode = SAMPLING_MODES[self._row_mode[rows].max()]
            self._postprocess = bool(self._row_postprocess[rows].any())
        return self._mode

    def _claim(self, req: Req, row: int) -> None:
        params = req.sampling_params
        self._row_req[row] = req
        seed = (self._seed + req.uid if params.seed is None else params.seed) % 2**64
        if self._row_params[row] is params and self._row_seed[row] == seed and not params.min_tokens:
            return
        self._row_params[row], self._row_seed[row] = params, seed
        self._row_mode[row] = 0 if params.is_greedy else 2 if params.is_filtered else 1
        self._row_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._state.set_params(row, pack_params(params, seed))
        self._ban_until[row] = req.prompt_len + params.min_tokens if params.min_tokens else 0
        self._set_processor(row, params, req.stop_ids if params.min_tokens else ())

    def _set_processor(self, row: int, params: SamplingParams, banned: Collection[int]) -> None:
        changed = params.changes_logits or bool(banned)
        self._row_processor[row] = RowProcessor.of(params, self._processor.vocab_size, banned) if changed else None
        self._row_postprocess[row] = changed or params.logprobs is not None

    def _lift_bans(self, batch: Batch) -> None:
        """Let Reqs end that have their ``min_tokens``; without another processor the step samples them again."""
        rows = batch.rows_host()
        until = self._ban_until[rows]
        ended = rows[(until > 0) & (until < batch.device_lens())]  # these count the token to sample
        if ended.size:
            self._ban_until[ended] = 0
            for row in ended.tolist():
                self._set_processor(row, self._row_req[row].sampling_params, ())
            self._postprocess = bool(self._row_postprocess[rows].any())

    def expected_params(self, rows: list[int]) -> torch.Tensor:
        """(len(rows), columns) int32 on the host: what these rows of ``DecodeState.params`` must hold."""
        packed = [pack_params(params, self._row_seed[row]) for row in rows if (params := self._row_params[row])]
        return torch.from_numpy(np.stack(packed))

    @property
    def needs_postprocessing(self) -> bool:
        """Whether the logits of any row of the batch prepared last are changed or read after the step."""
        return self._postprocess

    def sample(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, mode: SamplingMode
    ) -> torch.Tensor:
        """logits (B, V), rows and positions of the sampled tokens (B,) int32 -> (B,) int32; device work only."""
        args = _unpack(self._state.params.index_select(0, rows), positions)
        return self._ops.sample(logits, args, mode)

    def processed(self, logits: torch.Tensor, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The rows of logits (B, V) that have a processor, part by part: (C,) int32 which rows, and float32 copies
        (C, V) of their logits, processed. The caller drops both before the next part. Rows with a grammar come first.
        """
        self._lift_bans(batch)
        processors = [self._row_processor[row] for row in batch.rows_host().tolist()]
        found = [(row, each) for row, each in enumerate(processors) if each is not None]
        if not found:
            return iter(())
        found.sort(key=lambda pair: not pair[1].masked)
        rows, chosen = zip(*found, strict=True)
        return self._processor.process(logits, np.array(rows), [batch.reqs[row] for row in rows], chosen)

    def logprobs(self, logits: torch.Tensor, next_tokens: torch.Tensor, batch: Batch) -> LogprobRows | None:
        """Log-probabilities of the rows that request them, on their way to the host; None if none does."""
        requested = self._row_logprobs[batch.rows_host()]
        rows = np.flatnonzero(requested >= 0)
        if not rows.size:
            return None
        count, found, step = max(1, int(requested.max())), [], self._processor.max_rows
        for first in range(0, rows.size, step):
            places = self._processor.places(rows[first : first + step])
            found.append(read_logprobs(logits.index_select(0, places), next_tokens.index_select(0, places), count))
        chosen, values, ids = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True))
        return LogprobRows(rows.tolist(), requested[rows].tolist(), to_host(chosen), to_host(values), to_host(ids))

    def prompt_logprobs(self, batch: Batch, head: Callable[[torch.Tensor], torch.Tensor]) -> PromptScores | None:
        """Log-probabilities of the prompt tokens of a pass; None if no Req requests them. ``head``: the model's, hidden
        (N, hidden) -> logits (N, V).
        """
        return None if batch.scored is None else score(batch, self._processor.vocab_size, head)


def pack_params(params: SamplingParams, seed: int) -> np.ndarray:
    """A row of ``DecodeState.params``: (C,) int32, floats as their bits. ``seed`` is taken modulo 2**64.

    :func:`_unpack` reads it on the device.
    """
    seed %= 2**64
    low, high = np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32).view(np.int32)
    temperature = 0.0 if params.is_greedy else params.temperature
    top_k = max(params.top_k, 0)
    row = [_float_bits(temperature), top_k, _float_bits(params.top_p), _float_bits(params.min_p), low, high]
    return np.array(row, dtype=np.int32)


def _unpack(params: torch.Tensor, positions: torch.Tensor) -> SampleArgs:
    """params (B, C) int32, as :func:`pack_params` makes them -> each column as what it means."""
    floats = params.view(torch.float32)
    return SampleArgs(
        temperature=floats[:, 0],
        top_k=params[:, 1],
        top_p=floats[:, 2],
        min_p=floats[:, 3],
        seed_lo=params[:, 4],
        seed_hi=params[:, 5],
        positions=positions,
    )


def _float_bits(value: float) -> int:
    """A float32's bits as int32, so that it can travel among integers."""
    return int(np.array([value], dtype=np.float32).view(np.int32)[0])
