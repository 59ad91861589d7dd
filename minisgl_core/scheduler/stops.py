"""Which token ids may end a request. Every sampled token is looked up, so the lookup is one array access."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from minisgl_core.kvcache import IntegrityError

__all__ = ["StopIds"]


class StopIds:
    """Counts, for each token id, the admitted Reqs that it stops; an id that stops none is dropped at once.

    Each :meth:`add` needs its :meth:`remove`. Ids are below ``vocab_size``.
    """

    def __init__(self, vocab_size: int) -> None:
        self._count = np.zeros(vocab_size, dtype=np.int32)
        self._stops = np.zeros(vocab_size + 1, dtype=bool)
        """The last entry is for -1, which means NaN logits and ends any Req."""
        self._stops[-1] = True

    def add(self, ids: frozenset[int]) -> None:
        """Count a Req that these ids stop, when it is admitted."""
        self._change(ids, 1)

    def remove(self, ids: frozenset[int]) -> None:
        """Stop counting it, when it is released."""
        self._change(ids, -1)

    def _change(self, ids: frozenset[int], by: int) -> None:
        if ids:
            places = np.fromiter(ids, dtype=np.int64, count=len(ids))
            self._count[places] += by
            self._stops[places] = self._count[places] > 0

    def contains(self, tokens: np.ndarray) -> np.ndarray:
        """tokens (B,) int32 -> (B,) bool: those that may end some Req. -1 is one of them."""
        stops: np.ndarray = self._stops[tokens]
        return stops

    def check(self, expected: Iterable[frozenset[int]]) -> None:
        """Raise :class:`IntegrityError` unless exactly the admitted Reqs are counted, whose ids are ``expected``."""
        wanted = Counter(token for ids in expected for token in ids)
        counted = {int(token): int(self._count[token]) for token in np.flatnonzero(self._count)}
        if counted != wanted or set(np.flatnonzero(self._stops[:-1]).tolist()) != wanted.keys():
            raise IntegrityError(f"stop ids are counted as {counted}, the admitted Reqs have {dict(wanted)}")
