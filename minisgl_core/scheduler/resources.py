"""What admitted Reqs hold: table rows, pages, and entries in the count of stop ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from minisgl_core.core import Req, ReqTable
from minisgl_core.kvcache import CacheManager, IntegrityError, page_slots, run_places

from .records import PendingReq, ReqState, StateLike

if TYPE_CHECKING:
    from minisgl_core.kvcache import CacheHandle

__all__ = ["Resources", "StopIds"]

MIN_LOOKAHEAD: Final = 16
"""Tokens that a decoding Req has slots for in advance, so that a steady step allocates nothing."""
LOOKAHEAD: Final = ((32, 64), (8, 24), (0, MIN_LOOKAHEAD), (0, 0))
"""(low, target) in tokens: Reqs with slots for fewer than ``low`` more tokens get slots for ``target``. The Reqs of a
batch then run out together, and the passes in between allocate nothing. Pairs are tried in order; the first uses idle
pages only, and never evicts a prefix; the last is what the next pass cannot do without.
"""


class Resources:
    """Owns the free rows, the :class:`CacheManager` and the :class:`StopIds` of one engine, and writes the page table
    through ``state``.

    ``max_len``: tokens of the longest Req. Pages are held by row, in token order; the first ``handle.cached_len / S``
    pages of a Req belong to the prefix cache. ``rows`` (B,) int64 are rows of Reqs. ``distrust`` is called with free
    pages that may hold NaN, before they are allocated again.
    """

    def __init__(
        self,
        manager: CacheManager,
        max_running_req: int,
        max_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        state: StateLike,
        distrust: Callable[[np.ndarray], None],
    ) -> None:
        self.manager = manager
        self.num_rows = max_running_req
        self.free_rows = list(range(max_running_req - 1, -1, -1))
        self.table = ReqTable(max_running_req, max_len + 1)
        self.stops = StopIds(vocab_size)
        self.query_tokens = self.hit_tokens = 0
        """Prompt tokens looked up in the prefix cache so far, and those of them that were found."""
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
        """A row and pages for all tokens of ``pending``; None if they are not available.

        Leaves the rows ``running`` pages for :data:`MIN_LOOKAHEAD` more tokens each, so that none of them is
        preempted at once. With nothing running only the tokens themselves must fit, as :class:`Limits` ensures.
        """
        if not self.free_rows:
            return None
        length, final = len(pending.tokens), len(pending.tokens) + max(pending.output_len - 1, 0)
        # The last token is always computed: its logits are needed. Where the prompt is scored, all of them are.
        handle = self.manager.match(pending.tokens[: -1 if pending.params.prompt_logprobs is None else 0])
        self.manager.lock(handle)
        pages = self.manager.pages_for(min(length + MIN_LOOKAHEAD, final)) - len(handle.pages)
        if pages + int(self._missing(running, MIN_LOOKAHEAD).sum()) > self.manager.available_pages:
            pages = self.manager.pages_for(length) - len(handle.pages)
            if running.size or pages > self.manager.available_pages:
                self.manager.unlock(handle)
                return None
        self.query_tokens += length
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
        self.stops.add(req.stop_ids)
        req.extra = ReqState(handle, pending)
        self._pages[req.table_idx, : len(pages)] = pages
        self._held[req.table_idx] = len(pages)
        self._state.set_slots(req.table_idx, 0, page_slots(pages, self.manager.page_size))
        return req

    # ---- while it runs -------------------------------------------------------------------------------------------

    def publish(self, req: Req) -> None:
        """Share the prompt's pages as far as the next pass fills them.

        Later passes, and other rows of the same one, may read them: each layer stores K and V of all rows before its
        attention runs.
        """
        state: ReqState = req.extra
        state.handle = self.manager.publish(req.tokens[: req.device_len], self.pages(req), state.handle)
        req.cache_handle = state.handle

    def grow(self, rows: np.ndarray) -> bool:
        """Allocate slots for the next decode pass of ``rows`` and for some later ones; False if the next lacks any."""
        limit = self.manager.free_pages
        for low, target in LOOKAHEAD:
            short = rows[self._missing(rows, low) > 0]
            if not short.size:
                return True
            missing = self._missing(short, target)
            if missing.sum() <= limit:
                self._allocate(short, missing)
                return True
            limit = self.manager.available_pages
        return False

    def _missing(self, rows: np.ndarray, ahead: int) -> np.ndarray:
        """(B,) pages that the rows lack for their tokens and ``ahead`` more. The last token needs no slot."""
        table = self.table
        tokens = np.minimum(table.device_len[rows] + ahead, table.max_device_len[rows] - 1)
        missing: np.ndarray = np.maximum(-(-tokens // self.manager.page_size) - self._held[rows], 0)
        return missing

    def _allocate(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Give each of ``rows`` its ``counts`` (B,) of pages, from one allocation."""
        pages, size, held = self.manager.allocate(int(counts.sum())), self.manager.page_size, self._held[rows]
        self._pages[np.repeat(rows, counts), run_places(held, counts)] = pages
        self._state.extend_slots(rows, held * size, counts * size, page_slots(pages, size))
        self._held[rows] = held + counts

    def reclaim(self, rows: np.ndarray) -> bool:
        """Take back the lookahead pages of ``rows``, which hold no tokens yet; return whether there were any.

        No pass may be in flight: only then do passes touch nothing past the lengths. Entries of the page table past a
        row's length still name these slots; nothing reads them before the row gets others.
        """
        table, held = self.table, self._held[rows]
        tokens = np.maximum(table.device_len[rows], table.num_tokens[rows])  # the whole of a partial prompt
        needed = np.minimum(-(-tokens // self.manager.page_size), held)
        unused = held - needed
        if not unused.any():
            return False
        self.manager.allocator.free(self._pages[np.repeat(rows, unused), run_places(needed, unused)])
        self._held[rows] = needed
        return True

    def steps_until_refresh(self, rows: np.ndarray) -> int:
        """Decode passes that can be launched before one of ``rows`` needs slots or reaches its last token."""
        table = self.table
        bounds = np.minimum(self._held[rows] * self.manager.page_size + 1, table.max_device_len[rows])
        return int((bounds - table.device_len[rows]).min())

    # ---- the end -------------------------------------------------------------------------------------------------

    def release(self, req: Req) -> None:
        """Free row and pages, which no pass in flight may use. What has been computed stays as a cached prefix."""
        state: ReqState = req.extra
        if state.has_nan:
            self._distrust(self.manager.drop_req(self.pages(req), state.handle))
        else:
            with_kv = min(req.cached_len, req.num_tokens)  # a dropped token has KV but no id
            self.manager.cache_req(req.tokens[:with_kv], self.pages(req), state.handle)
        self.free_rows.append(req.table_idx)
        self.stops.remove(req.stop_ids)
        req.extra = req.cache_handle = None  # a reference to the Req that is left over keeps no prefix alive

    def check(self, reqs: Collection[Req]) -> None:
        """Raise :class:`IntegrityError` unless ``reqs`` and what is free account for all rows, pages and stop ids."""
        rows = sorted([*self.free_rows, *(req.table_idx for req in reqs)])
        if rows != list(range(self.num_rows)):
            raise IntegrityError(f"{len(reqs)} Reqs and the free rows hold {rows}, the table has {self.num_rows} rows")
        self.manager.check([(self.pages(req), req.extra.handle) for req in reqs])
        self.stops.check(req.stop_ids for req in reqs)


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
