"""Table rows and pages: what a Req needs to run, handed out and taken back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from minisgl_core.core import Req, ReqTable
from minisgl_core.kvcache import CacheManager, IntegrityError, page_slots, run_places

from .records import PendingReq, ReqState, StateLike

if TYPE_CHECKING:
    from minisgl_core.kvcache import CacheHandle

__all__ = ["Resources"]

AHEAD: Final = 16
"""Tokens that a decoding Req is given slots for in advance, so that a steady step allocates nothing."""
CLAIMS: Final = ((32, 64), (8, 24), (0, AHEAD), (0, 0))
"""Who has slots for fewer tokens than the first number gets them for the second: the Reqs of a batch then run out
together, and the passes in between allocate nothing. The first claim is made of idle pages only: prefixes are never
evicted for it. The last is what the next pass cannot do without.
"""


class Resources:
    """Owns the free rows and the :class:`CacheManager` of one engine; ``state`` is told what the page table must say.

    ``max_len``: of the longest Req, in tokens. Pages are held by row, in token order; the first ``handle.cached_len /
    S`` of a Req belong to the prefix cache. ``rows`` (B,) int64 are rows of Reqs. ``distrust`` is given free pages that
    may hold NaN, before they are handed out again.
    """

    def __init__(
        self,
        manager: CacheManager,
        max_running_req: int,
        max_len: int,
        eos_token_ids: frozenset[int],
        state: StateLike,
        distrust: Callable[[np.ndarray], None],
    ) -> None:
        self.manager = manager
        self.num_rows = max_running_req
        self.free_rows = list(range(max_running_req - 1, -1, -1))
        self.table = ReqTable(max_running_req, max_len + 1)
        self.hit_tokens = 0
        """Prompt tokens found in the prefix cache so far."""
        self.eos_token_ids = eos_token_ids
        self._state, self._distrust = state, distrust
        self._pages = np.empty((max_running_req, manager.pages_for(max_len)), dtype=np.int32)
        self._held = np.zeros(max_running_req, dtype=np.int64)
        """(R,) pages of each row"""

    def pages(self, req: Req) -> np.ndarray:
        """All pages of ``req``: a view."""
        return self._pages[req.table_idx, : self._held[req.table_idx]]

    # ---- admission -----------------------------------------------------------------------------------------------

    def admit(self, pending: PendingReq, running: np.ndarray) -> Req | None:
        """A row and pages for all tokens of ``pending``; None if they are not there.

        Leaves the rows ``running`` pages for :data:`AHEAD` more tokens each, lest one of them be preempted at once.
        With nothing running only the tokens themselves must fit, which :class:`Limits` has made sure of.
        """
        if not self.free_rows:
            return None
        length, final = len(pending.tokens), len(pending.tokens) + max(pending.output_len - 1, 0)
        # The last token is always computed: it brings the logits. Where the prompt is scored, each of its tokens does.
        handle = self.manager.match(pending.tokens[: -1 if pending.params.prompt_logprobs is None else 0])
        self.manager.lock(handle)
        pages = self.manager.pages_for(min(length + AHEAD, final)) - len(handle.pages)
        if pages + int(self._missing(running, AHEAD).sum()) > self.manager.available_pages:
            pages = self.manager.pages_for(length) - len(handle.pages)
            if running.size or pages > self.manager.available_pages:
                self.manager.unlock(handle)
                return None
        self.hit_tokens += handle.cached_len
        return self._make_req(pending, handle, np.concatenate([handle.pages, self.manager.allocate(pages)]))

    def _make_req(self, pending: PendingReq, handle: CacheHandle, pages: np.ndarray) -> Req:
        req = Req(
            torch.from_numpy(pending.tokens),
            table_idx=self.free_rows.pop(),
            cached_len=handle.cached_len,
            output_len=pending.output_len,
            uid=pending.uid,
            sampling_params=pending.params,
            cache_handle=handle,
            table=self.table,
        )
        req.prompt_len = pending.prompt_len  # what a preempted Req had generated stays output
        if not pending.params.ignore_eos:
            req.stop_ids |= self.eos_token_ids
        req.extra = ReqState(handle, pending.announced)
        self._pages[req.table_idx, : len(pages)] = pages
        self._held[req.table_idx] = len(pages)
        self._state.set_slots(req.table_idx, 0, page_slots(pages, self.manager.page_size))
        return req

    # ---- while it runs -------------------------------------------------------------------------------------------

    def publish(self, req: Req) -> None:
        """Share the prompt's pages as far as the pass about to be launched fills them.

        Later passes, and other rows of the same one, may read them: K and V of a whole pass are stored before any of
        its attention runs, layer by layer.
        """
        state: ReqState = req.extra
        state.handle = self.manager.publish(req.tokens[: req.device_len], self.pages(req), state.handle)
        req.cache_handle = state.handle

    def grow(self, rows: np.ndarray) -> bool:
        """Slots for the next decode pass of all ``rows`` and for some after it; False if not even those of the next."""
        limit = self.manager.free_pages
        for low, ahead in CLAIMS:
            short = rows[self._missing(rows, low) > 0]
            if not short.size:
                return True
            missing = self._missing(short, ahead)
            if missing.sum() <= limit:
                self._hand_out(short, missing)
                return True
            limit = self.manager.available_pages
        return False

    def _missing(self, rows: np.ndarray, ahead: int) -> np.ndarray:
        """(B,) pages that the rows lack for their tokens and ``ahead`` more. The last token needs no slot."""
        table = self.table
        tokens = np.minimum(table.device_len[rows] + ahead, table.max_device_len[rows] - 1)
        missing: np.ndarray = np.maximum(-(-tokens // self.manager.page_size) - self._held[rows], 0)
        return missing

    def _hand_out(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Give each of ``rows`` its ``counts`` (B,) of pages, from one allocation."""
        pages, size, held = self.manager.allocate(int(counts.sum())), self.manager.page_size, self._held[rows]
        self._pages[np.repeat(rows, counts), run_places(held, counts)] = pages
        self._state.extend_slots(rows, held * size, counts * size, page_slots(pages, size))
        self._held[rows] = held + counts

    def reclaim(self, rows: np.ndarray) -> bool:
        """Take back the pages that ``rows`` claimed ahead and have no tokens for; was there any?

        No pass may be in flight: what one may touch is then below the lengths. Entries of the page table past a row's
        length go on to name these slots; nothing looks there before the row is given others.
        """
        table, held = self.table, self._held[rows]
        tokens = np.maximum(table.device_len[rows], table.num_tokens[rows])  # of a prompt computed in part: all of it
        needed = np.minimum(-(-tokens // self.manager.page_size), held)
        unused = held - needed
        if not unused.any():
            return False
        self.manager.allocator.free(self._pages[np.repeat(rows, unused), run_places(needed, unused)])
        self._held[rows] = needed
        return True

    def quiet_passes(self, rows: np.ndarray) -> int:
        """Decode passes that can be launched before one of ``rows`` needs slots or reaches its last token."""
        table = self.table
        bounds = np.minimum(self._held[rows] * self.manager.page_size + 1, table.max_device_len[rows])
        return int((bounds - table.device_len[rows]).min())

    # ---- the end -------------------------------------------------------------------------------------------------

    def release(self, req: Req) -> None:
        """Row and pages back; no pass in flight may touch them any more. What has been computed stays as a prefix."""
        state: ReqState = req.extra
        if state.poisoned:
            self._distrust(self.manager.drop_req(self.pages(req), state.handle))
        else:
            with_kv = min(req.cached_len, req.num_tokens)  # a dropped token has KV but no id
            self.manager.cache_req(req.tokens[:with_kv], self.pages(req), state.handle)
        self.free_rows.append(req.table_idx)
        req.extra = req.cache_handle = None  # who still has the Req, as the last of its row, keeps no prefix with it

    def check(self, reqs: Collection[Req]) -> None:
        """Raise :class:`IntegrityError` unless rows and pages are all accounted for by ``reqs`` and the free ones."""
        rows = sorted([*self.free_rows, *(req.table_idx for req in reqs)])
        if rows != list(range(self.num_rows)):
            raise IntegrityError(f"{len(reqs)} Reqs and the free rows hold {rows}, the table has {self.num_rows} rows")
        self.manager.check([(self.pages(req), req.extra.handle) for req in reqs])
