"""Table rows and pages: what a Req needs to run, handed out and taken back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from minisgl_core.core import Req
from minisgl_core.kvcache import CacheManager, IntegrityError, page_slots

from .records import PendingReq, ReqState

if TYPE_CHECKING:
    from minisgl_core.core import SamplingParams

__all__ = ["Resources"]

AHEAD = 16
"""Tokens that a decoding Req is given slots for in advance, so that a steady step allocates nothing."""
FAR_AHEAD = 64
"""The same while pages lie idle: prefixes are never evicted for it."""

SetSlots = Callable[[int, int, np.ndarray], None]


class Resources:
    """Owns the free rows and the :class:`CacheManager` of one engine; ``set_slots`` writes its page table."""

    def __init__(
        self, manager: CacheManager, max_running_req: int, eos_token_ids: frozenset[int], set_slots: SetSlots
    ) -> None:
        self.manager = manager
        self.free_rows = list(range(max_running_req - 1, -1, -1))
        self.hit_tokens = 0
        """Prompt tokens found in the prefix cache so far."""
        self._num_rows = max_running_req
        self._eos_token_ids = eos_token_ids
        self._set_slots = set_slots

    # ---- admission -----------------------------------------------------------------------------------------------

    def admit(self, pending: PendingReq, running: Collection[Req]) -> Req | None:
        """A row and pages for all tokens of ``pending``; None if they are not there.

        Leaves ``running`` the pages they need for the next :data:`AHEAD` tokens, lest one of them be preempted at once.
        With nothing running only the tokens themselves must fit, which :class:`Limits` has made sure of.
        """
        if not self.free_rows:
            return None
        length, final = len(pending.tokens), len(pending.tokens) + pending.output_len - 1
        handle = self.manager.match(pending.tokens[:-1])  # the last token is always computed: it brings the logits
        self.manager.lock(handle)
        pages = self.manager.pages_for(min(length + AHEAD, final)) - len(handle.pages)
        if pages + self._missing_ahead(running) > self.manager.available_pages:
            pages = self.manager.pages_for(length) - len(handle.pages)
            if running or pages > self.manager.available_pages:
                self.manager.unlock(handle)
                return None
        self.hit_tokens += handle.cached_len
        return self._make_req(
            pending,
            ReqState(
                np.concatenate([handle.pages, self.manager.allocate(pages)]), handle, self._stop_ids(pending.params)
            ),
        )

    def _missing_ahead(self, running: Iterable[Req]) -> int:
        return sum(self._missing(req, AHEAD) for req in running)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else self._eos_token_ids | own

    def _make_req(self, pending: PendingReq, state: ReqState) -> Req:
        req = Req(
            torch.from_numpy(pending.tokens),
            table_idx=self.free_rows.pop(),
            cached_len=state.handle.cached_len,
            output_len=pending.output_len,
            uid=pending.uid,
            sampling_params=pending.params,
            cache_handle=state.handle,
        )
        req.prompt_len = pending.prompt_len  # what a preempted Req had generated stays output
        req.extra = state
        self._set_slots(req.table_idx, 0, page_slots(state.pages, self.manager.page_size))
        return req

    # ---- while it runs -------------------------------------------------------------------------------------------

    def publish(self, req: Req) -> None:
        """Share the prompt's pages as far as the pass about to be launched fills them.

        Later passes, and other rows of the same one, may read them: K and V of a whole pass are stored before any of
        its attention runs, layer by layer.
        """
        state: ReqState = req.extra
        state.handle = self.manager.publish(req.tokens[: req.device_len], state.pages, state.handle)
        req.cache_handle = state.handle

    def grow(self, reqs: list[Req]) -> bool:
        """Slots for the next decode pass of all ``reqs`` and for some after it; False if not even those of the next."""
        available = self.manager.available_pages
        for ahead, limit in ((FAR_AHEAD, self.manager.free_pages), (AHEAD, available), (0, available)):
            missing = [self._missing(req, ahead) for req in reqs]
            if sum(missing) <= limit:
                self._hand_out(reqs, missing)
                return True
        return False

    def _missing(self, req: Req, ahead: int) -> int:
        """Pages that ``req`` lacks for its tokens and ``ahead`` more. The last token it generates needs no slot."""
        tokens = min(req.device_len + ahead, req.max_device_len - 1)
        return max(0, self.manager.pages_for(tokens) - len(req.extra.pages))

    def _hand_out(self, reqs: list[Req], missing: list[int]) -> None:
        pages = self.manager.allocate(sum(missing))
        slots, size, start = page_slots(pages, self.manager.page_size), self.manager.page_size, 0
        for req, count in zip(reqs, missing, strict=True):
            if count:
                state: ReqState = req.extra
                end = start + count
                self._set_slots(req.table_idx, len(state.pages) * size, slots[start * size : end * size])
                state.pages = np.concatenate([state.pages, pages[start:end]])
                start = end

    def quiet_passes(self, req: Req) -> int:
        """Decode passes that can be launched before ``req`` needs slots or reaches its last token."""
        slots = len(req.extra.pages) * self.manager.page_size
        return min(slots - req.device_len + 1, req.max_device_len - req.device_len)

    # ---- the end -------------------------------------------------------------------------------------------------

    def release(self, req: Req) -> None:
        """Row and pages back; no pass in flight may touch them any more. What has been computed stays as a prefix."""
        state: ReqState = req.extra
        if state.poisoned:
            self.manager.drop_req(state.pages, state.handle)
        else:
            with_kv = min(req.cached_len, req.num_tokens)  # a dropped token has KV but no id
            self.manager.cache_req(req.tokens[:with_kv], state.pages, state.handle)
        self.free_rows.append(req.table_idx)
        req.extra = None

    def check(self, reqs: Collection[Req]) -> None:
        """Raise :class:`IntegrityError` unless rows and pages are all accounted for by ``reqs`` and the free ones."""
        rows = sorted([*self.free_rows, *(req.table_idx for req in reqs)])
        if rows != list(range(self._num_rows)):
            raise IntegrityError(f"{len(reqs)} Reqs and the free rows hold {rows}, the table has {self._num_rows} rows")
        self.manager.check([(req.extra.pages, req.extra.handle) for req in reqs])
