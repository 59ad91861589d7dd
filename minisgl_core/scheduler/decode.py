"""Decode passes: the running Reqs, and a batch that is launched again and again while nothing about them changes."""

from __future__ import annotations

from itertools import compress

import numpy as np

from minisgl_core.core import Batch, Req

from .resources import Resources

__all__ = ["DecodeBatcher"]


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
