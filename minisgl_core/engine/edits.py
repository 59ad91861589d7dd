"""Penalties, biases and bans: changes of logits that one Req wants and others do not, made outside the step.

A batch's rows that ask for them are dealt with part by part, each in a number of operations that does not depend on its
rows. Shapes: C rows of a part, V vocabulary, N numbers of all rows of a part, row after row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np
import torch

from .upload import PackedUpload

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from minisgl_core.core import Req, SamplingParams
    from minisgl_core.plugin_api import Platform

__all__ = ["PART_BYTES", "LogitEditor", "RowEdit", "row_parts"]

PART_BYTES: Final = 64 << 20
"""Most float32 logits that are copied at once: what edits and log-probabilities take of the device, beside a pass of
any size, is a small multiple of this. A single row may be larger.
"""
USUAL_TOKENS: Final = 1024
"""Of a row: an upload has room for as many of each row of a part"""
ROW_NUMBERS: Final = 7
"""Of an upload, for each row beside its tokens and biases: its place, three penalties, three counts"""


class RowEdit(NamedTuple):
    """One request's penalties, biases and bans, made ready once."""

    penalties: np.ndarray
    """(3,) float32: repetition, presence, frequency"""
    repeats: bool
    """Is there a repetition penalty, which looks at the prompt as well?"""
    counts: bool
    """Is there a presence or frequency penalty?"""
    bias_ids: np.ndarray
    """int32, ascending, each once"""
    bias: np.ndarray
    """float32; minus infinity bans a token"""

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int, banned: Collection[int] = ()) -> RowEdit:
        """Biases of one token add up. Tokens beyond the vocabulary are left out."""
        penalties = [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
        sums: dict[int, float] = {}
        for token, value in cast("Sequence[tuple[int, float]]", params.logit_bias):
            if token < vocab_size:
                sums[token] = sums.get(token, 0.0) + value
        sums |= dict.fromkeys((token for token in banned if token < vocab_size), -math.inf)
        ids = sorted(sums)
        return cls(
            np.array(penalties, dtype=np.float32),
            params.repetition_penalty != 1.0,
            bool(params.presence_penalty or params.frequency_penalty),
            np.array(ids, dtype=np.int32),
            np.array([sums[token] for token in ids], dtype=np.float32),
        )

    def tokens(self, req: Req) -> tuple[np.ndarray, np.ndarray]:
        """The Req's output and its prompt, int32, as far as they matter here."""
        known, start = req.tokens, req.prompt_len
        output = known[start:] if self.repeats or self.counts else known[:0]
        return output, known[:start] if self.repeats else known[:0]


def row_parts(sizes: Sequence[int], max_rows: int, max_numbers: int) -> Iterator[slice]:
    """Runs of rows, together all of them: each of at most ``max_rows``, and of one row or at most ``max_numbers`` in
    ``sizes``.
    """
    start = total = 0
    for row, size in enumerate(sizes):
        if row > start and (row - start == max_rows or total + size > max_numbers):
            yield slice(start, row)
            start, total = row, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))


class _Part(NamedTuple):
    """What the host knows of a part's rows, on the device: int32."""

    places: torch.Tensor
    """(C,) rows of the batch"""
    penalties: torch.Tensor
    """(3C,) the bits of float32"""
    counts: torch.Tensor
    """(3C,) tokens of output, of prompt, and biases of each row"""
    tokens: torch.Tensor
    """(N,) all rows' output, then all rows' prompts"""
    bias_ids: torch.Tensor
    """(N,)"""
    bias: torch.Tensor
    """(N,) the bits of float32"""


class LogitEditor:
    """Edits copies of logits (C, V); ``width``: the longest Req."""

    def __init__(self, platform: Platform, vocab_size: int, max_running_req: int, width: int) -> None:
        self.vocab_size = vocab_size
        self.max_rows = min(max_running_req, max(1, PART_BYTES // (4 * vocab_size)))
        capacity = width + 2 * vocab_size + (USUAL_TOKENS + ROW_NUMBERS) * self.max_rows
        self._upload = PackedUpload(platform, capacity)
        self._room = capacity - ROW_NUMBERS * self.max_rows

    def places(self, rows: np.ndarray) -> torch.Tensor:
        """(C,) int32 on the device, until the next upload."""
        return self._upload.send([rows.astype(np.int32)])[0]

    def edited(
        self, logits: torch.Tensor, rows: np.ndarray, reqs: Sequence[Req], edits: Sequence[RowEdit]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each part of ``rows`` of logits (B, V): these rows (C,) int32, and float32 copies (C, V) after the edits
        of their Reqs. Both are to be let go before the next part.
        """
        texts = [edit.tokens(req) for edit, req in zip(edits, reqs, strict=True)]
        sizes = [
            output.size + prompt.size + 2 * edit.bias.size for (output, prompt), edit in zip(texts, edits, strict=True)
        ]
        for part in row_parts(sizes, self.max_rows, self._room):
            sent = self._send(rows[part], texts[part], edits[part])
            num_output = sum(output.size for output, _ in texts[part])
            copy = logits.index_select(0, sent.places).float()
            self._penalise(copy, sent, edits[part], num_output)
            self._bias(copy, sent)
            places = sent.places
            del sent
            yield places, copy
            del copy

    def _send(
        self, rows: np.ndarray, texts: Sequence[tuple[np.ndarray, np.ndarray]], edits: Sequence[RowEdit]
    ) -> _Part:
        outputs, prompts = zip(*texts, strict=True)
        counts = [len(piece) for piece in (*outputs, *prompts, *(edit.bias for edit in edits))]
        parts = [
            rows.astype(np.int32),
            np.concatenate([edit.penalties for edit in edits]).view(np.int32),
            np.array(counts, dtype=np.int32),
            np.concatenate([*outputs, *prompts]),
            np.concatenate([edit.bias_ids for edit in edits]),
            np.concatenate([edit.bias for edit in edits]).view(np.int32),
        ]
        return _Part(*self._upload.send(parts))

    def _penalise(self, logits: torch.Tensor, part: _Part, edits: Sequence[RowEdit], num_output: int) -> None:
        """In place. Repetition (Keskar et al. 2019) looks at prompt and output, the others at the output only."""
        size = part.tokens.shape[0]
        if not size:
            return
        row = torch.arange(len(edits), device=logits.device)
        owner = torch.repeat_interleave(row.repeat(2), part.counts[: 2 * len(edits)], output_size=size)
        where = owner * logits.shape[1] + part.tokens
        repetition, presence, frequency = part.penalties.view(torch.float32).view(-1, 3).unbind(1)
        flat = logits.view(-1)
        # A token that is met several times is written several times, always the same.
        if any(edit.repeats for edit in edits):
            values, penalty = flat[where], repetition[owner]
            flat[where] = torch.where(values > 0, values / penalty, values * penalty)
        if num_output and any(edit.counts for edit in edits):
            where, owner = where[:num_output], owner[:num_output]
            # Counted in the very places of the logits: these are few, and another table of this size would be large.
            # Whole numbers: their sum does not depend on the order, and every rank gets the same.
            values = flat[where]
            flat[where] = 0.0
            counts = flat.scatter_add_(0, where, torch.ones_like(values))[where]
            flat[where] = values - (presence[owner] + frequency[owner] * counts)

    def _bias(self, logits: torch.Tensor, part: _Part) -> None:
        """In place."""
        size = part.bias.shape[0]
        if not size:
            return
        num_rows, vocab_size = logits.shape
        row = torch.arange(num_rows, device=logits.device)
        owner = torch.repeat_interleave(row, part.counts[2 * num_rows :], output_size=size)
        logits.view(-1)[owner * vocab_size + part.bias_ids] += part.bias.view(torch.float32)
