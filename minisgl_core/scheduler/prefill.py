"""Which prompts the next pass computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from minisgl_core.core import Req

from .decode import DecodeSet
from .records import PendingReq
from .resources import Resources

__all__ = ["PrefillBatch", "PrefillQueue"]


class PrefillBatch(NamedTuple):
    """Reqs with ``device_len`` set to where this pass ends; of ``chunks`` (row numbers) the prompt goes on."""

    reqs: list[Req]
    chunks: frozenset[int]


class PrefillQueue:
    """First come, first served: the head waits for room and the others behind it, so that nobody starves.

    At most one Req at a time has its prompt computed in part (``partial``); it goes first.
    """

    def __init__(self, resources: Resources, max_prefill_tokens: int) -> None:
        self.partial: Req | None = None
        self._resources = resources
        self._budget = max_prefill_tokens
        self._waiting: deque[PendingReq] = deque()
        self._blocked = False

    def __len__(self) -> int:
        """Requests waiting to be admitted."""
        return len(self._waiting)

    def add(self, pending: PendingReq) -> None:
        self._waiting.append(pending)

    def put_back(self, pending: PendingReq) -> None:
        """Preempted: before all others."""
        self._waiting.appendleft(pending)

    def remove(self, pending: PendingReq) -> None:
        self._waiting.remove(pending)
        self._blocked = False  # if it was the head, the next may fit

    def unblock(self) -> None:
        """Rows or pages have come back: the head may fit now."""
        self._blocked = False

    @property
    def ready(self) -> bool:
        """Is a call of :meth:`next_batch` worth its while?"""
        return self.partial is not None or (bool(self._waiting) and not self._blocked)

    def next_batch(self, running: DecodeSet, admitted: Callable[[PendingReq, Req], None]) -> PrefillBatch | None:
        """Up to ``max_prefill_tokens`` new tokens. Reqs whose prompt is complete with this pass join ``running``;
        ``admitted`` is told of each new Req.
        """
        left, reqs = self._budget, []
        if self.partial is not None:
            req, self.partial = self.partial, None
            left -= self._take(req, left, running)
            reqs.append(req)
        while left and self._waiting and not self._blocked:
            new = self._resources.admit(self._waiting[0], running.rows)
            if new is None:
                self._blocked = True
                break
            admitted(self._waiting.popleft(), new)
            left -= self._take(new, left, running)
            reqs.append(new)
        chunks = frozenset(row for row, req in enumerate(reqs) if req.device_len < req.num_tokens)
        return PrefillBatch(reqs, chunks) if reqs else None

    def _take(self, req: Req, left: int, running: DecodeSet) -> int:
        """Let this pass compute up to ``left`` tokens of ``req``; returns how many."""
        count = min(left, req.num_tokens - req.cached_len)
        req.device_len = req.cached_len + count
        self._resources.publish(req)
        if req.device_len < req.num_tokens:
            self.partial = req
        else:
            running.add(req)
        return count
