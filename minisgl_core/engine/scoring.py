"""Log-probabilities of prompts: which tokens of a prefill pass are scored, and what the head makes of them.

The token at a position is scored by the one before it. So a chunk's last token scores the first of the next chunk, and
a prompt's last token scores none: it is sampled from. Shapes: B Reqs, S scored tokens of a pass, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from minisgl_core.core import ScoredRows

from .logits_processors import PART_BYTES
from .logprobs import TokenLogprobs, read_logprobs, to_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from minisgl_core.core import Batch

    from .state import DecodeState

__all__ = ["MAX_HEAD_ROWS", "PromptScores", "find_scored", "score"]

MAX_HEAD_ROWS: Final = 512
"""Rows of the head at once. Fewer where the vocabulary is large: see :data:`PART_BYTES`."""


class PromptScores(NamedTuple):
    """Log-probabilities of prompt tokens, on their way to the host."""

    counts: tuple[tuple[int, int, int], ...]
    """(row of the batch, its scored tokens, how many of the likeliest it wants)"""
    targets: torch.Tensor
    """(S,) int32"""
    chosen: torch.Tensor
    """(S,) float32"""
    values: torch.Tensor
    """(S, N) float32, N the most that any row wants, at least 1"""
    ids: torch.Tensor
    """(S, N) int64"""

    def collect(self) -> dict[int, list[TokenLogprobs]]:
        """By row of the batch: an entry for each of its scored tokens' targets."""
        targets, chosen = self.targets.tolist(), self.chosen.tolist()
        values, ids = self.values.tolist(), self.ids.tolist()
        found: dict[int, list[TokenLogprobs]] = {}
        first = 0
        for row, count, wanted in self.counts:
            found[row] = [
                TokenLogprobs(targets[i], chosen[i], list(zip(ids[i][:wanted], values[i][:wanted], strict=True)))
                for i in range(first, first + count)
            ]
            first += count
        return found


def find_scored(batch: Batch, state: DecodeState) -> ScoredRows:
    """The rows to score of a prefill batch, at least one of whose Reqs requests it."""
    cached, lens = batch.cached_lens(), batch.device_lens()
    ends = np.cumsum(lens - cached)
    starts, places, targets, counts = ends - (lens - cached), [], [], []
    for row, req in enumerate(batch.reqs):
        if req.sampling_params.prompt_logprobs is not None:
            before, after = int(cached[row]) + 1, min(int(lens[row]) + 1, req.prompt_len)
            targets.append(req.tokens[before : max(before, after)])
            places.append(starts[row] + np.arange(targets[-1].size))
            counts.append((row, targets[-1].size))
    scored, last = np.concatenate(places), ends - 1
    kept = np.union1d(scored, last)
    parts = [kept, np.searchsorted(kept, last), np.searchsorted(kept, scored)]
    sent = state.send([*(part.astype(np.int32) for part in parts), np.concatenate(targets)])
    on_device = [part.to(torch.int64) for part in sent[:3]]
    return ScoredRows(on_device[0], on_device[1], on_device[2], sent[3].clone(), tuple(counts))


def score(batch: Batch, vocab_size: int, head: Callable[[torch.Tensor], torch.Tensor]) -> PromptScores:
    """What the ``head``, hidden (N, hidden) -> logits (N, V), says of the scored rows of a pass that has run."""
    rows = batch.scored
    assert rows is not None and rows.hidden is not None
    counts = tuple((row, count, batch.reqs[row].sampling_params.prompt_logprobs or 0) for row, count in rows.counts)
    most = max(1, *(wanted for _, _, wanted in counts))
    step = max(1, min(MAX_HEAD_ROWS, PART_BYTES // (4 * vocab_size)))
    found = [
        read_logprobs(head(rows.hidden.index_select(0, places)), targets, most)
        for places, targets in zip(rows.scored.split(step), rows.targets.split(step), strict=True)
        if places.numel()
    ]
    parts = [torch.cat(part) for part in zip(*found, strict=True)] or 3 * [rows.hidden.new_empty((0, most))]
    rows.hidden = None
    return PromptScores(counts, *map(to_host, (rows.targets, *parts)))
