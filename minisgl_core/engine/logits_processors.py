"""Logits processors: penalties, biases, bans and masks, which some requests of a batch have and others do not.

They run after the step, on the rows that have one, part by part; the number of operations of a part does not depend on
its rows. Shapes: C rows of a part, V vocabulary, N numbers of all rows of a part, row after row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np
import torch

from .state import PackedUpload

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from minisgl_core.core import Req, SamplingParams
    from minisgl_core.plugin_api import Platform

    from .masks import TokenMasks

__all__ = ["PART_BYTES", "LogitsProcessor", "RowProcessor", "row_parts"]

PART_BYTES: Final = 64 << 20
"""Most bytes of float32 logits that are copied at once: processors and log-probabilities need a small multiple of this
on the device, whatever the size of the pass. A single row may be larger.
"""
USUAL_TOKENS: Final = 1024
"""An upload has room for this many tokens of each row of a part."""
UNLIKELY: Final = -1e30
"""Bias of a token that a row with a grammar should not take: it is taken if the grammar allows no other."""
ROW_NUMBERS: Final = 7
"""Numbers of an upload for each row, in addition to its tokens and biases: its place, three penalties, three counts"""


class RowProcessor(NamedTuple):
    """The penalties, biases and bans of one request, prepared once."""

    penalties: np.ndarray
    """(3,) float32: repetition, presence, frequency"""
    repeats: bool
    """Whether there is a repetition penalty, which reads the prompt as well"""
    counts: bool
    """Whether there is a presence or frequency penalty"""
    bias_ids: np.ndarray
    """int32, ascending, no duplicates"""
    bias: np.ndarray
    """float32; minus infinity bans a token"""
    masked: bool
    """Whether it has a grammar, which masks tokens"""

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int, banned: Collection[int] = ()) -> RowProcessor:
        """Biases of one token add up. Tokens beyond the vocabulary are left out."""
        penalties = [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
        sums: dict[int, float] = {}
        for token, value in cast("Sequence[tuple[int, float]]", params.logit_bias):
            if token < vocab_size:
                sums[token] = sums.get(token, 0.0) + value
        masked = params.grammar is not None
        ban = UNLIKELY if masked else -math.inf
        sums |= dict.fromkeys((token for token in banned if token < vocab_size), ban)
        ids = sorted(sums)
        return cls(
            np.array(penalties, dtype=np.float32),
            params.repetition_penalty != 1.0,
            bool(params.presence_penalty or params.frequency_penalty),
            np.array(ids, dtype=np.int32),
            np.array([sums[token] for token in ids], dtype=np.float32),
            masked,
        )

    def tokens(self, req: Req) -> tuple[np.ndarray, np.ndarray]:
        """The Req's output and its prompt, int32; empty where no penalty reads them."""
        known, start = req.tokens, req.prompt_len
        output = known[start:] if self.repeats or self.counts else known[:0]
        return output, known[:start] if self.repeats else known[:0]


def row_parts(sizes: Sequence[int], max_rows: int, max_numbers: int) -> Iterator[slice]:
    """Consecutive runs that cover all rows: each has at most ``max_rows`` rows, and is one row or has at most
    ``max_numbers`` of ``sizes``.
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
    """What the host sends for the rows of a part, on the device: int32."""

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
    masks: torch.Tensor
    """(M * W,) packed masks of the first M rows, which have a grammar"""


class LogitsProcessor:
    """Applies the processors of rows to copies of their logits (C, V). ``width``: tokens of the longest Req."""

    def __init__(
        self, platform: Platform, vocab_size: int, max_running_req: int, width: int, masks: TokenMasks
    ) -> None:
        self.vocab_size, self._masks = vocab_size, masks
        self.max_rows = min(max_running_req, max(1, PART_BYTES // (4 * vocab_size)))
        capacity = width + 2 * vocab_size + masks.num_words + (USUAL_TOKENS + ROW_NUMBERS) * self.max_rows
        self._upload = PackedUpload(platform, capacity)
        self._room = capacity - ROW_NUMBERS * self.max_rows

    def places(self, rows: np.ndarray) -> torch.Tensor:
        """(C,) int32 on the device, until the next upload."""
        return self._upload.send([rows.astype(np.int32)])[0]

    def process(
        self, logits: torch.Tensor, rows: np.ndarray, reqs: Sequence[Req], processors: Sequence[RowProcessor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each part of ``rows`` of logits (B, V): these rows (C,) int32, and float32 copies (C, V) of their logits,
        processed. The caller drops both before the next part. Rows with a grammar come first.
        """
        texts = [each.tokens(req) for each, req in zip(processors, reqs, strict=True)]
        sizes = [
            output.size + prompt.size + 2 * each.bias.size + self._masks.num_words * each.masked
            for (output, prompt), each in zip(texts, processors, strict=True)
        ]
        for part in row_parts(sizes, self.max_rows, self._room):
            masked = sum(each.masked for each in processors[part])
            masks = self._masks.fill(reqs[part][:masked])
            sent = self._send(rows[part], texts[part], processors[part], masks)
            num_output = sum(output.size for output, _ in texts[part])
            copy = logits.index_select(0, sent.places).float()
            self._penalise(copy, sent, processors[part], num_output)
            self._bias(copy, sent)
            if masked:
                self._masks.apply(copy[:masked], sent.masks)
            places = sent.places
            del sent
            yield places, copy
            del copy

    def _send(
        self,
        rows: np.ndarray,
        texts: Sequence[tuple[np.ndarray, np.ndarray]],
        processors: Sequence[RowProcessor],
        masks: np.ndarray,
    ) -> _Part:
        outputs, prompts = zip(*texts, strict=True)
        counts = [len(numbers) for numbers in (*outputs, *prompts, *(each.bias for each in processors))]
        parts = [
            rows.astype(np.int32),
            np.concatenate([each.penalties for each in processors]).view(np.int32),
            np.array(counts, dtype=np.int32),
            np.concatenate([*outputs, *prompts]),
            np.concatenate([each.bias_ids for each in processors]),
            np.concatenate([each.bias for each in processors]).view(np.int32),
            masks,
        ]
        return _Part(*self._upload.send(parts))

    def _penalise(self, logits: torch.Tensor, part: _Part, processors: Sequence[RowProcessor], num_output: int) -> None:
        """In place. Repetition (Keskar et al. 2019) reads prompt and output, the others read the output only."""
        size = part.tokens.shape[0]
        if not size:
            return
        row = torch.arange(len(processors), device=logits.device)
        owner = torch.repeat_interleave(row.repeat(2), part.counts[: 2 * len(processors)], output_size=size)
        where = owner * logits.shape[1] + part.tokens
        repetition, presence, frequency = part.penalties.view(torch.float32).view(-1, 3).unbind(1)
        flat = logits.view(-1)
        # A token that occurs several times is written several times, with the same value.
        if any(each.repeats for each in processors):
            values, penalty = flat[where], repetition[owner]
            flat[where] = torch.where(values > 0, values / penalty, values * penalty)
        if num_output and any(each.counts for each in processors):
            where, owner = where[:num_output], owner[:num_output]
            # Counted where the logits are: the tokens are few, and another table of this size would be large.
            # Whole numbers: their sum does not depend on the order, so all ranks get the same.
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
