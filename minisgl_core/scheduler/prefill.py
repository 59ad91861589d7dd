"""Prefill passes: which prompts, and how much of each, the next pass computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from minisgl_core.core import Req

from .decode import DecodeBatcher
from .records import PendingReq
from .request_queue import RequestQueue
from .resources import Resources

__all__ = ["PrefillBatch", "PrefillBatcher"]


class PrefillBatch(NamedTuple):
    """Reqs with ``device_len`` set to where this pass ends, and the rows whose prompt continues after it."""

    reqs: list[Req]
    chunks: frozenset[int]


class PrefillBatcher:
    """Forms batches of up to ``max_prefill_tokens`` new tokens from the head of ``queue``.

    A head that does not fit waits for pages, and the requests behind it wait with it: a large request is never passed
    over for ever. At most one Req at a time has part of its prompt computed (``partial``); it goes first.
    """

    def __init__(self, resources: Resources, queue: RequestQueue, max_prefill_tokens: int) -> None:
        self.partial: Req | None = None
        self._resources = resources
        self._queue = queue
        self._budget = max_prefill_tokens
        self._blocked: PendingReq | None = None
        """A head that did not fit when it was last tried."""

    def unblock(self) -> None:
        """Rows or pages were released: the head may fit now."""
        self._blocked = None

    @property
    def ready(self) -> bool:
        """Whether :meth:`next_batch` may find a batch."""
        return self.partial is not None or self._head() is not None

    def next_batch(
        self, running: DecodeBatcher, on_admission: Callable[[PendingReq, Req], None]
    ) -> PrefillBatch | None:
        """Form the next batch. Reqs whose prompt is complete with it join ``running``.

        ``on_admission`` is called with each request that becomes a Req.
        """
        left, reqs = self._budget, []
        if self.partial is not None:
            req, self.partial = self.partial, None
            left -= self._take(req, left, running)
            reqs.append(req)
        while left and (head := self._head()) is not None:
            new = self._resources.admit(head, running.rows)
            if new is None:
                self._blocked = head
                break
            on_admission(self._queue.pop(), new)
            left -= self._take(new, left, running)
            reqs.append(new)
        chunks = frozenset(row for row, req in enumerate(reqs) if req.device_len < req.num_tokens)
        return PrefillBatch(reqs, chunks) if reqs else None

    def _head(self) -> PendingReq | None:
        """The next request, unless it is known not to fit."""
        head = self._queue.peek()
        return None if head is self._blocked else head

    def _take(self, req: Req, left: int, running: DecodeBatcher) -> int:
        """Let this pass compute up to ``left`` tokens of ``req``; return how many."""
        count = min(left, req.num_tokens - req.cached_len)
        req.device_len = req.cached_len + count
        self._resources.publish(req)
        if req.device_len < req.num_tokens:
            self.partial = req
        else:
            running.add(req)
        return count
