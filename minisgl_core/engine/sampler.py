"""From logits to tokens: in the step where it can be, outside where a request edits or reads its logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from minisgl_core.plugin_api import SampleArgs

from .config import SAMPLING_MODES
from .state import pack_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl_core.core import Batch, Req, SamplingParams
    from minisgl_core.plugin_api import LayerOps, SamplingMode

    from .state import DecodeState

__all__ = ["LogprobRows", "Sampler", "TokenLogprobs"]


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities under the model's own distribution, before temperature and penalties."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    """(token id, logprob), likeliest first."""


class LogprobRows(NamedTuple):
    """Log-probabilities on their way to the host, for the rows of a batch that asked."""

    rows: list[int]
    wanted: list[int]
    chosen: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor

    def collect(self, tokens: list[int]) -> list[TokenLogprobs | None]:
        """One entry per row of the batch, None where not asked; ``tokens``: every row's."""
        found: list[TokenLogprobs | None] = [None] * len(tokens)
        chosen, values, ids = self.chosen.tolist(), self.values.tolist(), self.ids.tolist()
        for i, (row, n) in enumerate(zip(self.rows, self.wanted, strict=True)):
            top = list(zip(ids[i][:n], values[i][:n], strict=True))
            found[row] = TokenLogprobs(tokens[row], chosen[i], top)
        return found


class Sampler:
    """Keeps each row's parameters on the device current, and runs the ``sample`` operation."""

    def __init__(self, ops: LayerOps, state: DecodeState, seed: int) -> None:
        self._ops, self._state, self._seed = ops, state, seed
        self._row_params: list[SamplingParams | None] = [None] * (state.dummy_row + 1)
        self._row_seed = [0] * (state.dummy_row + 1)
        self._row_req = np.full(state.dummy_row + 1, None, dtype=object)
        self._row_edits = np.zeros(state.dummy_row + 1, dtype=bool)
        self._row_mode = np.zeros(state.dummy_row + 1, dtype=np.int8)
        self._seen: np.ndarray | None = None
        """``Batch.table_idx`` of the batch prepared last."""
        self._mode: SamplingMode = "greedy"
        self._edits = False

    def prepare(self, batch: Batch) -> SamplingMode:
        """Stage the parameters of rows that changed hands; returns the cheapest mode that serves all rows."""
        if batch.table_idx is None or batch.table_idx is not self._seen:
            rows = batch.rows_host()
            owners = self._row_req[rows].tolist()
            if owners != batch.reqs:
                for req, owner in zip(batch.reqs, owners, strict=True):
                    if owner is not req:
                        self._claim(req, req.table_idx)
            self._seen = batch.table_idx
            self._mode = SAMPLING_MODES[self._row_mode[rows].max()]
            self._edits = bool(self._row_edits[rows].any())
        return self._mode

    def _claim(self, req: Req, row: int) -> None:
        params = req.sampling_params
        self._row_req[row], self._row_edits[row] = req, params.edits_logits
        seed = (self._seed + req.uid if params.seed is None else params.seed) % 2**64
        if self._row_params[row] is params and self._row_seed[row] == seed:
            return
        self._row_params[row], self._row_seed[row] = params, seed
        self._row_mode[row] = 0 if params.is_greedy else 2 if params.is_filtered else 1
        self._state.set_params(row, params, seed)

    def expected_params(self, rows: list[int]) -> torch.Tensor:
        """(len(rows), columns) int32 on the host: what these rows of ``DecodeState.params`` must hold."""
        packed = [pack_params(params, self._row_seed[row]) for row in rows if (params := self._row_params[row])]
        return torch.from_numpy(np.stack(packed))

    @property
    def edits_logits(self) -> bool:
        """Does any row of the batch prepared last need its logits edited or read outside the step?"""
        return self._edits

    def sample(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, mode: SamplingMode
    ) -> torch.Tensor:
        """logits (B, V), rows and positions of the sampled tokens (B,) int32 -> (B,) int32; device work only."""
        params = self._state.params.index_select(0, rows)
        floats = params.view(torch.float32)
        args = SampleArgs(
            temperature=floats[:, 0],
            top_k=params[:, 1],
            top_p=floats[:, 2],
            min_p=floats[:, 3],
            seed_lo=params[:, 4],
            seed_hi=params[:, 5],
            positions=positions,
        )
        return self._ops.sample(logits, args, mode)

    def edited(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """A float32 copy of logits (B, V) after each Req's penalties and biases."""
        copy = logits.float().clone()
        for row, req in enumerate(batch.reqs):
            edit_logits(copy[row], req)
        return copy

    def logprobs(self, logits: torch.Tensor, next_tokens: torch.Tensor, batch: Batch) -> LogprobRows | None:
        """Log-probabilities of the rows that asked, on the device; None if none did."""
        asked = [(i, req.sampling_params.logprobs) for i, req in enumerate(batch.reqs)]
        rows = [i for i, n in asked if n is not None]
        if not rows:
            return None
        wanted = [n for _, n in asked if n is not None]
        table = torch.log_softmax(logits[rows].float(), dim=-1)
        chosen = table.gather(-1, next_tokens[rows].clamp(min=0)[:, None].to(torch.int64))[:, 0]
        values, ids = table.topk(max(1, *wanted), dim=-1)
        return LogprobRows(rows, wanted, chosen, values, ids)


def edit_logits(row: torch.Tensor, req: Req) -> None:
    """Apply a request's penalties and biases to its logits (V,) in place.

    Repetition (Keskar et al. 2019) counts prompt and output; presence and frequency count the output only.
    """
    p = req.sampling_params
    if p.repetition_penalty != 1.0:
        seen = torch.from_numpy(req.tokens.astype("int64")).unique().to(row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        output = torch.from_numpy(req.tokens[req.prompt_len :].astype("int64"))
        ids, counts = output.unique(return_counts=True)
        row[ids.to(row.device)] -= (p.presence_penalty + p.frequency_penalty * counts.float()).to(row.device)
    for token, value in cast("Sequence[tuple[int, float]]", p.logit_bias):
        if token < row.numel():
            row[token] += value
