"""The running Reqs, and the decode batch that is launched again and again while nothing about them changes."""

from __future__ import annotations

from itertools import compress

import numpy as np

from minisgl_core.core import Batch, Req

from .resources import Resources

__all__ = ["DecodeSet"]


class DecodeSet:
    """``running`` holds the Reqs whose prompt is computed, oldest first.

    While ``quiet`` is above 0 that many passes can be launched without a look at any Req.
    """

    def __init__(self, resources: Resources) -> None:
        self.running: list[Req] = []
        self.quiet = 0
        self.uids: list[int] = []
        """Of the present batch, row by row."""
        self._resources = resources
        self._rows = np.empty(resources.num_rows, dtype=np.int64)
        self._present = self._rows[:0]
        """Rows of the present batch"""
        self._batch = Batch(reqs=[], phase="decode", table=resources.table, table_idx=self._present)

    @property
    def rows(self) -> np.ndarray:
        """(running,) int64: their ``table_idx``; valid until one comes or goes."""
        return self._rows[: len(self.running)]

    def disturb(self) -> None:
        """The running Reqs or their pages have changed."""
        self.quiet = 0

    def add(self, req: Req) -> None:
        self._rows[len(self.running)] = req.table_idx
        self.running.append(req)
        self.quiet = 0

    def remove(self, req: Req) -> None:
        place, rows = self.running.index(req), self.rows
        rows[place:-1] = rows[place + 1 :]
        del self.running[place]
        if req.table_idx in self._present:  # one that has had its last pass is in the batch no more
            self.quiet = 0

    def candidates(self) -> np.ndarray:
        """(running,) bool: those that another pass can bring a token."""
        table, rows = self._resources.table, self.rows
        unfinished: np.ndarray = table.device_len[rows] < table.max_device_len[rows]
        return unfinished

    def refresh(self, chosen: np.ndarray) -> bool:
        """Make the ``chosen`` (running,) bool the present batch; False if there are no pages for their next tokens."""
        rows = self.rows[chosen]
        if not self._resources.grow(rows):
            return False
        self.quiet = self._resources.quiet_passes(rows)
        reqs = list(compress(self.running, chosen.tolist()))
        if reqs != self._batch.reqs:
            self._batch = Batch(reqs=reqs, phase="decode", table=self._resources.table, table_idx=rows)
            self._present = rows
            self.uids = [req.uid for req in reqs]
        return True

    def take(self) -> Batch:
        """The present batch, for one more pass. The same object each time: what the last pass derived is cleared."""
        batch = self._batch
        batch.view = batch.input_ids = batch.positions = batch.out_loc = None
        batch.scratch.clear()
        self.quiet -= 1
        return batch
