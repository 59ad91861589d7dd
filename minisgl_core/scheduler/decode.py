"""The running Reqs, and the decode batch that is launched again and again while nothing about them changes."""

from __future__ import annotations

from minisgl_core.core import Batch, Req

from .resources import Resources

__all__ = ["DecodeSet"]


class DecodeSet:
    """``running`` holds the Reqs whose prompt is computed, oldest first.

    While ``quiet`` is above 0 that many passes can be launched without a look at any single Req.
    """

    def __init__(self, resources: Resources) -> None:
        self.running: list[Req] = []
        self.quiet = 0
        self.uids: list[int] = []
        """Of the present batch, row by row."""
        self._resources = resources
        self._batch = Batch(reqs=[], phase="decode")

    def disturb(self) -> None:
        """The running Reqs or their pages have changed."""
        self.quiet = 0

    def remove(self, req: Req) -> None:
        self.running.remove(req)
        self.quiet = 0

    def candidates(self) -> list[Req]:
        """Reqs that another pass can bring a token."""
        return [req for req in self.running if req.can_decode]

    def refresh(self, reqs: list[Req]) -> bool:
        """Make ``reqs`` the present batch; False if the pages for their next tokens are not there."""
        if not self._resources.grow(reqs):
            return False
        self.quiet = min(map(self._resources.quiet_passes, reqs))
        if reqs != self._batch.reqs:
            self._batch = Batch(reqs=reqs, phase="decode")
            self.uids = [req.uid for req in reqs]
        return True

    def take(self) -> Batch:
        """The present batch, for one more pass. The same object each time: what the last pass derived is cleared."""
        batch = self._batch
        batch.view = batch.input_ids = batch.positions = batch.out_loc = None
        batch.scratch.clear()
        self.quiet -= 1
        return batch
