"""A one-layer decoder on fixed buffers: the host side of a graph runner, small enough to compare step by step.

Every row of a batch writes one slot of a paged cache, reads its own slots, and increments its length. Lengths are
incremented in place, so that a row that occurs twice in the batch is detected. Shapes: B rows, V vocabulary, N hidden
width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from minisgl_core.plugin_api import Phase, SamplingMode, StepOutput

from .check_run import Draw

if TYPE_CHECKING:
    from .device_fixture import DeviceFixture

__all__ = ["ToyBatch", "ToyHost"]

MAX_ROWS = 12
MAX_LEN = 24
VOCAB = 40
HIDDEN = 16


@dataclass
class ToyBatch:
    """The part of a batch that a runner reads. ``table_rows``: the live rows."""

    table_rows: tuple[int, ...]
    phase: Phase = "decode"
    mode: SamplingMode = "greedy"
    padded_size: int = 0
    captured: bool = False
    rows: torch.Tensor | None = None
    scratch: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.table_rows)


class ToyHost:
    """Implements ``plugin_api.GraphHost``; two hosts with the same seed are equal."""

    def __init__(self, fixture: DeviceFixture, seed: int) -> None:
        draw, self.device = Draw(fixture, seed), fixture.device
        self._embedding, self._out = draw.normal(VOCAB, HIDDEN), draw.normal(VOCAB, HIDDEN)
        self.rows = torch.full((MAX_ROWS,), MAX_ROWS, dtype=torch.int64, device=self.device)
        self.lengths = torch.zeros(MAX_ROWS + 1, dtype=torch.int64, device=self.device)
        self.last_token = torch.arange(MAX_ROWS + 1, device=self.device) * 3 % VOCAB
        self.cache = torch.zeros(MAX_ROWS + 1, MAX_LEN, HIDDEN, device=self.device)
        self.lengths_host = [0] * MAX_ROWS
        self.captured: list[tuple[int, SamplingMode]] = []
        self.steps = self.prepared = 0

    def step(self, batch: ToyBatch) -> StepOutput:
        """Rows attend to what they have written; ``mode`` changes the logits."""
        self.steps += 1
        rows = batch.rows
        assert rows is not None
        at = self.lengths[rows]
        x = self._embedding[self.last_token[rows]]
        self.cache[rows, at] = x
        seen = torch.arange(MAX_LEN, device=self.device) <= at[:, None]
        scores = (self.cache[rows] * x[:, None]).sum(-1).masked_fill(~seen, -torch.inf)
        mixed = (torch.softmax(scores, -1)[:, :, None] * self.cache[rows]).sum(1)
        logits = mixed @ self._out.t() * {"greedy": 1.0, "random": -1.0, "filtered": 0.5}[batch.mode]
        if batch.mode == "filtered":
            logits = logits + torch.arange(VOCAB, device=self.device) * 0.05
        tokens = logits.argmax(-1)
        self.lengths.index_add_(0, rows, torch.ones_like(rows))
        self.last_token.index_copy_(0, rows, tokens)
        self.lengths[MAX_ROWS:].zero_()
        return StepOutput(logits, tokens.to(torch.int32))

    def make_capture_batch(self, size: int, mode: SamplingMode) -> ToyBatch:
        """``size`` dummy rows on the fixed buffer."""
        self.captured.append((size, mode))
        self.rows[:size].fill_(MAX_ROWS)
        return ToyBatch((), mode=mode, padded_size=size, captured=True, rows=self.rows[:size])

    def prepare_replay(self, batch: ToyBatch) -> None:
        self.prepared += 1

    def upload(self, batch: ToyBatch) -> None:
        """Upload the live rows, then the dummy row, like the core before a pass."""
        padded = [*batch.table_rows, *[MAX_ROWS] * (batch.padded_size - batch.size)]
        rows = torch.tensor(padded, device=self.device)
        if len(padded) <= MAX_ROWS:
            self.rows[: len(padded)].copy_(rows)
            rows = self.rows[: len(padded)]
        batch.rows = rows

    def finish(self, batch: ToyBatch) -> None:
        """Record a pass on the host."""
        for row in batch.table_rows:
            self.lengths_host[row] += 1

    def input_buffers(self) -> Mapping[str, torch.Tensor]:
        return {"rows": self.rows, "lengths": self.lengths, "last_token": self.last_token}

    def expected_inputs(self, batch: ToyBatch) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        padded = [*batch.table_rows, *[MAX_ROWS] * (batch.padded_size - batch.size)]
        live = list(batch.table_rows)
        lengths = torch.tensor([self.lengths_host[row] for row in live], device=self.device)
        return {
            "rows": (self.rows[: batch.padded_size], torch.tensor(padded, device=self.device)),
            "lengths": (self.lengths[live], lengths),
        }

    def state(self) -> dict[str, torch.Tensor]:
        """All state that a step may change, without the dummy row."""
        named = {"lengths": self.lengths, "last_token": self.last_token, "cache": self.cache}
        return {name: tensor[:MAX_ROWS] for name, tensor in named.items()}
