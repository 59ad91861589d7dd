"""The two ends of a model, cut by vocabulary rows; the vocabulary need not divide by the number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch

from minisgl_core.checkpoint import WeightTarget

from .base import Layer

if TYPE_CHECKING:
    from minisgl_core.core import Context

__all__ = ["LMHead", "VocabEmbedding"]

ALL = slice(None)


class VocabTable(Layer):
    """Rows ``start .. start + rows`` of a (vocab, hidden) table, padded so that all ranks hold equally many."""

    def __init__(self, ctx: Context, vocab_size: int, hidden_size: int, storage: torch.Tensor | None = None) -> None:
        self._ctx, self._vocab = ctx, vocab_size
        padded = -(-vocab_size // ctx.tp.size)
        self.start = min(ctx.tp.rank * padded, vocab_size)
        self.rows = min(padded, vocab_size - self.start)
        shape = (padded, hidden_size)
        self.weight = torch.zeros(shape, dtype=ctx.dtype, device=ctx.device) if storage is None else storage

    def weight_targets(self, prefix: str, names: Collection[str]) -> Iterator[WeightTarget]:
        index = (slice(self.start, self.start + self.rows), ALL)
        shape = (self._vocab, self.weight.shape[1])
        yield WeightTarget(f"{prefix}weight", shape, index, self.weight[: self.rows])


class VocabEmbedding(VocabTable):
    """Token ids to hidden rows."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (T,) int32 -> new (T, hidden), summed over ranks."""
        return self._ctx.comm.all_reduce(self._ctx.kv.index(self.weight, ids, self.start, self.rows))


class LMHead(VocabTable):
    """Hidden rows to logits. ``tied``: the embedding whose storage it shares."""

    def __init__(self, ctx: Context, vocab_size: int, hidden_size: int, tied: VocabEmbedding | None = None) -> None:
        super().__init__(ctx, vocab_size, hidden_size, None if tied is None else tied.weight)
        self._tied = tied
        self._prepared: Any = None

    def tie(self, embedding: VocabEmbedding) -> None:
        """Share the embedding's storage: the checkpoint has no head of its own."""
        self._tied, self.weight = embedding, embedding.weight

    def untie(self) -> None:
        """Take storage of its own: the checkpoint has a head."""
        if self._tied is not None:
            self._tied, self.weight = None, torch.zeros_like(self.weight)

    def weight_targets(self, prefix: str, names: Collection[str]) -> Iterator[WeightTarget]:
        if self._tied is None:
            yield from super().weight_targets(prefix, names)

    def finish(self) -> None:
        self._prepared = self._ctx.linear.prepare_weights(self.weight)
        kept = self._ctx.linear.weight_of(self._prepared)
        if kept is None and self._tied is None:
            kept = self.weight.new_empty((0, self.weight.shape[1]))  # the backend has it in a format of its own
        if kept is not None:
            self.weight = kept
            if self._tied is not None:
                self._tied.weight = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, hidden) -> (B, vocab), the same on every rank."""
        logits = self._ctx.comm.all_gather(self._ctx.linear.forward(x, self._prepared))
        return logits[:, : self._vocab]
