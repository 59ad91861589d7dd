"""Masks of constrained answers: filled on rank 0, sent to the other ranks, applied to logits.

Shapes: M rows with a grammar, V vocabulary, W = ceil(V / 32) words of a packed mask.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from minisgl_core.plugin_api import mask_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl_core.core import Req
    from minisgl_core.plugin_api import Communicator

__all__ = ["TokenMasks"]


class TokenMasks:
    """With a ``comm`` every rank applies the masks of the same rows in the same order; ``dtype``: one that it adds."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        comm: Communicator | None = None,
        is_primary: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_words = mask_words(vocab_size)
        self._comm, self._is_primary, self._dtype = comm, is_primary, dtype
        self._bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)

    def fill(self, reqs: Sequence[Req]) -> np.ndarray:
        """The packed masks of ``reqs``: (M * W,) int32, bit i % 32 of word i // 32 set where token i is allowed. All 0
        on ranks other than the first.
        """
        words = np.zeros((len(reqs), self.num_words), dtype=np.int32)
        if self._is_primary:
            for row, req in zip(words, reqs, strict=True):
                if req.grammar is None or not req.grammar.fill_mask(row):
                    row.fill(-1)
        return words.reshape(-1)

    def apply(self, logits: torch.Tensor, words: torch.Tensor) -> None:
        """Set the logits (M, V) of tokens that are not allowed to minus infinity. ``words``: :meth:`fill`'s, on the
        device.
        """
        num_rows, vocab_size = logits.shape
        denied = (self._shared(words.view(torch.uint8))[:, None] & self._bits) == 0
        logits.masked_fill_(denied.view(num_rows, -1)[:, :vocab_size], -math.inf)

    def _shared(self, masks: torch.Tensor) -> torch.Tensor:
        """(N,) uint8: the first rank's; the sum with zeros. Each byte is exact in any floating dtype."""
        if self._comm is None:
            return masks
        return self._comm.all_reduce(masks.to(self._dtype)).to(torch.uint8)
