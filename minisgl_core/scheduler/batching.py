"""Forms batches: which prompts, and how much of each, a prefill pass computes; which Reqs a decode pass serves."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import NamedTuple

import numpy as np

from minisgl_core.core import Batch, Req

from .records import PendingReq
from .request_queue import RequestQueue
from .resources import Resources

__all__ = ["DecodeBatcher", "PrefillBatch", "PrefillBatcher"]


class DecodeBatcher:
    """``running`` holds the Reqs whose prompt is computed, oldest first.

    While ``steps_until_refresh`` is above 0, that many passes can be launched without looking at any Req.
    """

    def __init__(self, resources: Resources) -> None:
        self.running: list[Req] = []
        self.steps_until_refresh = 0
        self.uids: list[int] = []
        """Those of the current batch, row by row."""
        self._resources = resources
        self._rows = np.empty(resources.num_rows, dtype=np.int64)
        self._batch_rows = self._rows[:0]
        self._batch = Batch(reqs=[], phase="decode", table=resources.table, table_idx=self._batch_rows)

    @property
    def rows(self) -> np.ndarray:
        """(running,) int64: their ``table_idx``; valid until a Req joins or leaves."""
        return self._rows[: len(self.running)]

    def invalidate(self) -> None:
        """The running Reqs or their pages have changed: refresh the batch before the next pass."""
        self.steps_until_refresh = 0

    def add(self, req: Req) -> None:
        self._rows[len(self.running)] = req.table_idx
        self.running.append(req)
        self.steps_until_refresh = 0

    def remove(self, req: Req) -> None:
        place, rows = self.running.index(req), self.rows
        rows[place:-1] = rows[place + 1 :]
        del self.running[place]
        if req.table_idx in self._batch_rows:  # a Req after its last pass is not
            self.steps_until_refresh = 0

    def unfinished(self) -> np.ndarray:
        """(running,) bool: the Reqs that can generate another token."""
        table, rows = self._resources.table, self.rows
        unfinished: np.ndarray = table.device_len[rows] < table.max_device_len[rows]
        return unfinished

    def refresh(self, chosen: np.ndarray) -> bool:
        """Make the Reqs ``chosen`` (running,) bool the batch; False if there are no pages for their next tokens."""
        rows = self.rows[chosen]
        if not self._resources.grow(rows):
            return False
        self.steps_until_refresh = self._resources.steps_until_refresh(rows)
        reqs = list(compress(self.running, chosen.tolist()))
        if reqs != self._batch.reqs:
            self._batch = Batch(reqs=reqs, phase="decode", table=self._resources.table, table_idx=rows)
            self._batch_rows = rows
            self.uids = [req.uid for req in reqs]
        return True

    def next_batch(self) -> Batch:
        """The batch for one more pass: the same object each time, without what the last pass derived."""
        batch = self._batch
        batch.view = batch.input_ids = batch.positions = batch.out_loc = None
        batch.scratch.clear()
        self.steps_until_refresh -= 1
        return batch


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
