"""Which token ids may end a request: asked for every sampled token, so the answer is one look into an array."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from minisgl_core.kvcache import IntegrityError

__all__ = ["StopIds"]


class StopIds:
    """Counts, for each token id, the admitted Reqs that it stops; an id that stops none is forgotten at once.

    Each :meth:`add` needs its :meth:`remove`. Ids are below ``vocab_size``.
    """

    def __init__(self, vocab_size: int) -> None:
        self._count = np.zeros(vocab_size, dtype=np.int32)
        self._stops = np.zeros(vocab_size + 1, dtype=bool)
        """The last entry is that of -1, NaN logits: these end any Req."""
        self._stops[-1] = True

    def add(self, ids: frozenset[int]) -> None:
        """A Req that these ids stop is admitted."""
        self._change(ids, 1)

    def remove(self, ids: frozenset[int]) -> None:
        """It holds nothing any more."""
        self._change(ids, -1)

    def _change(self, ids: frozenset[int], by: int) -> None:
        if ids:
            places = np.fromiter(ids, dtype=np.int64, count=len(ids))
            self._count[places] += by
            self._stops[places] = self._count[places] > 0

    def among(self, tokens: np.ndarray) -> np.ndarray:
        """tokens (B,) int32 -> (B,) bool: those that may end some Req. -1 is one of them."""
        stops: np.ndarray = self._stops[tokens]
        return stops

    def check(self, expected: Iterable[frozenset[int]]) -> None:
        """Raise :class:`IntegrityError` unless just the admitted Reqs are counted, whose ids are ``expected``."""
        wanted = Counter(token for ids in expected for token in ids)
        counted = {int(token): int(self._count[token]) for token in np.flatnonzero(self._count)}
        if counted != wanted or set(np.flatnonzero(self._stops[:-1]).tolist()) != wanted.keys():
            raise IntegrityError(f"stop ids are counted as {counted}, the admitted Reqs have {dict(wanted)}")
