"""One rank's scheduler: which Reqs the next pass serves, and what its tokens mean for them.

Every decision follows from the messages alone: no clock, no free-memory reading, no order of a set. Tensor-parallel
ranks that get the same messages before the same steps therefore launch the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minisgl_core.core import Batch, Req
from minisgl_core.env import ENV
from minisgl_core.errors import AdmissionError, EngineError
from minisgl_core.kvcache import CacheManager, MatchLen, NaiveCache, RadixCache, match_len

from .decode import DecodeSet
from .limits import Limits
from .messages import Abort, ClearCache, FinishReason, Message, NewReq, PromptOut, TokenOut, TokenOuts, TokenRun
from .prefill import PrefillQueue
from .records import EngineLike, Flight, ForwardOutputLike, PendingReq, ReqState
from .resources import Resources
from .stops import StopIds

if TYPE_CHECKING:
    from minisgl_core.engine import TokenLogprobs

__all__ = ["Scheduler", "SchedulerStats"]

MAX_PREFILL_RUN = 8
"""Prefill passes in a row after which running Reqs get a decode pass: new prompts must not silence them for ever."""

_NAN_LOGITS = (
    "the model's logits for this request were NaN; with dtype=float16 try bfloat16 or float32, which overflow later; "
    "else try other backends, `minisgl verify` checks one"
)


class SchedulerStats(NamedTuple):
    """A glance at the scheduler; counters count from its start."""

    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    """Pages held by the prefix cache, in use or not."""
    hit_tokens: int
    preemptions: int


class Scheduler:
    """Give it messages with :meth:`apply`, then call :meth:`step`, as long as :attr:`has_work`.

    With overlap a step launches its pass before it processes the tokens of the previous one, so a Req that ends is
    sometimes part of one more pass; that pass's token is dropped, and row and pages are kept until it is processed.
    """

    def __init__(
        self,
        engine: EngineLike,
        match_len: MatchLen = match_len,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """``match_len``: the ``kv`` role's. ``eos_token_ids``: further ones, beside those of the model's config."""
        config, size = engine.config, engine.page_size
        # A tokenizer may have more ids than the model.
        eos_token_ids = frozenset(token for token in eos_token_ids | engine.eos_token_ids if token < engine.vocab_size)
        self.limits = Limits(engine.max_seq_len, engine.num_pages * size, engine.vocab_size)
        cache = RadixCache(size, match_len) if config.cache == "radix" else NaiveCache()
        self._resources = Resources(
            CacheManager(engine.num_pages, size, cache),
            engine.max_running_req,
            self.limits.max_total_len,
            eos_token_ids,
            engine.state,
            engine.distrust,
        )
        engine.distrust()
        self._prefill = PrefillQueue(self._resources, config.max_prefill_tokens)
        self._decode = DecodeSet(self._resources)
        self._engine = engine
        self._overlap = not ENV.DISABLE_OVERLAP_SCHEDULING.value
        self._check = ENV.CHECK_INTEGRITY.value
        self._pending: dict[int, PendingReq] = {}
        self._reqs: dict[int, Req] = {}
        self._flight: Flight | None = None
        self._outs: list[TokenOut | TokenRun | PromptOut] = []
        self._zombies = 0
        """Reqs that have ended but are part of the pass in flight."""
        self._ended = np.zeros(engine.max_running_req, dtype=bool)
        """Their rows."""
        self._waits_for_host = 0
        """Reqs whose next token is sampled with the help of their previous one on the host."""
        self._prefill_run = 0
        self._preemptions = 0
        self._stops = StopIds(engine.vocab_size)

    @property
    def has_work(self) -> bool:
        """False when a step would do nothing."""
        return bool(self._reqs or self._pending or self._flight or self._outs)

    @property
    def stats(self) -> SchedulerStats:
        manager = self._resources.manager
        cached = manager.prefix_cache.evictable_pages + manager.prefix_cache.protected_pages
        return SchedulerStats(
            len(self._reqs),
            len(self._pending),
            manager.free_pages,
            cached,
            self._resources.hit_tokens,
            self._preemptions,
        )

    def check_integrity(self) -> None:
        """Raise :class:`~minisgl_core.kvcache.IntegrityError` unless every row and page is accounted for once, and
        nothing is kept of requests that have ended.
        """
        self._resources.check(self._reqs.values())
        self._stops.check(req.stop_ids for req in self._reqs.values())

    def clear_cache(self) -> None:
        """Forget all prefixes that no running Req uses."""
        self._resources.manager.clear_cache()

    def close(self) -> None:
        """The engine is about to be shut down: let go of the batches that refer to its memory."""
        self._flight, self._decode = None, DecodeSet(self._resources)

    # ---- messages ------------------------------------------------------------------------------------------------

    def apply(self, messages: Iterable[Message]) -> None:
        """Before a step: new requests join the queue or are refused at once, others end as soon as may be."""
        for message in messages:
            if isinstance(message, NewReq):
                self._add(message)
            elif isinstance(message, ClearCache):
                self.clear_cache()
            elif isinstance(message, Abort):
                for uid in range(message.uid, message.uid + message.n):
                    self._cancel(uid, "abort")
            else:
                self._cancel(message.uid, "stop")

    def _add(self, new: NewReq) -> None:
        """Choices queue one after the other: the first publishes the prompt's pages, the others find them."""
        uids = range(new.uid, new.uid + new.params.n)
        for uid in uids:
            if uid in self._reqs or uid in self._pending:
                raise EngineError(f"request uid {uid} is in use", field="uid", value=uid)
        try:
            self.limits.check(new.input_ids, new.params)
        except AdmissionError as error:
            self._outs += [TokenOut(uid, None, "error", str(error)) for uid in uids]
            return
        tokens = np.array(new.input_ids, dtype=np.int32)
        output_len = self.limits.output_len(len(tokens), new.params)
        for uid, params in zip(uids, new.params.choices(), strict=True):
            pending = PendingReq(uid, tokens, len(tokens), output_len, params, announced=uid != new.uid)
            self._pending[uid] = pending
            self._prefill.add(pending)

    def _cancel(self, uid: int, reason: FinishReason) -> None:
        if (pending := self._pending.pop(uid, None)) is not None:
            self._prefill.remove(pending)
            self._outs.append(TokenOut(uid, None, reason))
        elif (req := self._reqs.get(uid)) is not None and req.extra.outcome is None:
            self._end(req, TokenOut(uid, None, reason))

    # ---- one step ------------------------------------------------------------------------------------------------

    def step(self) -> TokenOuts:
        """Schedule and launch one pass, then process the previous one (without overlap: this one)."""
        if self._waits_for_host:
            self._drain()
        launched = self._launch()
        before, self._flight = self._flight, launched
        if before is not None:
            self._process(before)
        if not self._overlap:
            self._drain()
        if self._check:
            self.check_integrity()
        outs, self._outs = TokenOuts(self._outs), []
        return outs

    def _drain(self) -> None:
        """Process the pass in flight now."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._process(flight)

    # ---- schedule and launch -------------------------------------------------------------------------------------

    def _launch(self) -> Flight | None:
        if self._prefill_run >= MAX_PREFILL_RUN:
            self._prefill_run = 0
            flight = self._launch_decode() or self._launch_prefill()
        else:
            # All Reqs may end where a decode pass in want of pages drains the pass in flight: then the queue has room.
            flight = self._launch_prefill() or self._launch_decode() or self._launch_prefill()
        if flight is None and self._flight is None and (self._reqs or self._pending):
            raise EngineError(f"the scheduler is stuck: {self.stats}")
        return flight

    def _launch_prefill(self) -> Flight | None:
        if not self._prefill.ready:
            return None
        chosen = self._prefill.next_batch(self._decode, self._admitted)
        if chosen is None:
            return None
        self._prefill_run += 1
        self._decode.disturb()
        rows = np.array([req.table_idx for req in chosen.reqs], dtype=np.int64)
        batch = Batch(reqs=chosen.reqs, phase="prefill", table=self._resources.table, table_idx=rows)
        out = self._forward(batch)
        return Flight(chosen.reqs, [req.uid for req in chosen.reqs], rows, out, plain=False, chunks=chosen.chunks)

    def _admitted(self, pending: PendingReq, req: Req) -> None:
        del self._pending[pending.uid]
        self._reqs[req.uid] = req
        if not pending.announced and pending.params.prompt_logprobs is None:
            self._outs.append(PromptOut(req.uid, req.cached_len))
            req.extra.announced = True
        self._stops.add(req.stop_ids)
        self._waits_for_host += req.sampling_params.reads_output

    def _launch_decode(self) -> Flight | None:
        if not self._decode.quiet and not self._refresh_decode():
            return None
        self._prefill_run = 0
        batch = self._decode.take()
        assert batch.table_idx is not None
        out = self._forward(batch)
        return Flight(batch.reqs, self._decode.uids, batch.table_idx, out, plain=self._decode.quiet > 0)

    def _refresh_decode(self) -> bool:
        while (chosen := self._decode.candidates()).any():
            if self._decode.refresh(chosen):
                return True
            if self._flight is not None:
                self._drain()  # some of its Reqs may end here; and none is preempted with a token under way
            elif not self._resources.reclaim(self._admitted_rows()):
                self._preempt(self._prefill.partial or self._decode.running[-1])
        return False

    def _admitted_rows(self) -> np.ndarray:
        """(admitted,) int64: the running Reqs', oldest first, and that of a prompt computed in part."""
        partial = [] if self._prefill.partial is None else [self._prefill.partial.table_idx]
        return np.append(self._decode.rows, np.array(partial, dtype=np.int64))

    def _forward(self, batch: Batch) -> ForwardOutputLike:
        return self._engine.forward_batch(batch, self._engine.sampler.prepare(batch))

    def _preempt(self, req: Req) -> None:
        """The youngest goes back to the head of the queue with the tokens it has; they are computed again later."""
        tokens, left = req.tokens.copy(), req.max_device_len - req.num_tokens
        self._withdraw(req)
        params, announced = req.sampling_params, req.extra.announced
        if announced and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # scored already
        pending = PendingReq(req.uid, tokens, req.prompt_len, left, params, announced)
        self._release(req)
        self._pending[req.uid] = pending
        self._prefill.put_back(pending)
        self._preemptions += 1

    # ---- process -------------------------------------------------------------------------------------------------

    def _process(self, flight: Flight) -> None:
        """Most rows have brought a token and nothing else: they are dealt with together, the others one by one."""
        flight.out.wait()
        for row, scores in flight.out.prompt_logprobs().items():
            self._add_scores(flight.reqs[row], scores, row in flight.chunks)
        tokens = flight.out.next_tokens_cpu.numpy()
        logprobs = flight.out.logprobs()
        special = self._special_rows(flight, tokens) if logprobs is None else np.ones(len(tokens), dtype=bool)
        if not special.any():
            self._bring(flight.uids, flight.rows, tokens)
            return
        if not special.all():
            usual = ~special
            self._bring(list(compress(flight.uids, usual.tolist())), flight.rows[usual], tokens[usual])
        for row in np.flatnonzero(special).tolist():
            req, token = flight.reqs[row], int(tokens[row])
            self._process_row(req, token, row in flight.chunks, logprobs[row] if logprobs else None)

    def _add_scores(self, req: Req, scores: list[TokenLogprobs], is_chunk: bool) -> None:
        """Log-probabilities of a part of the prompt: said once, when they are all there."""
        state: ReqState = req.extra
        state.prompt_logprobs += scores
        if not is_chunk and state.outcome is None:
            self._outs.append(PromptOut(req.uid, 0, state.prompt_logprobs))
            state.announced = True

    def _special_rows(self, flight: Flight, tokens: np.ndarray) -> np.ndarray:
        """(B,) bool: of these a token may be the last one, or none."""
        rows, table = flight.rows, self._resources.table
        special = self._stops.among(tokens)
        if self._zombies:
            special |= self._ended[rows]
        if not flight.plain:
            special |= table.num_tokens[rows] + 1 >= table.max_device_len[rows]
            special[list(flight.chunks)] = True
        return special

    def _bring(self, uids: list[int], rows: np.ndarray, tokens: np.ndarray) -> None:
        """One more token for each of ``rows``."""
        self._resources.table.append_tokens(rows, tokens)
        self._outs.append(TokenRun(uids, tokens.tolist()))

    def _process_row(self, req: Req, token: int, is_chunk: bool, logprobs: TokenLogprobs | None) -> None:
        state: ReqState = req.extra
        if state.outcome is not None:
            state.poisoned |= token < 0
            self._zombies -= 1
            self._ended[req.table_idx] = False
            self._release(req)
        elif token < 0:
            state.poisoned = True
            self._end(req, TokenOut(req.uid, None, "error", _NAN_LOGITS))
        elif not is_chunk and req.num_tokens == req.max_device_len:
            self._end(req, TokenOut(req.uid, None, "length"))  # only its prompt was to be scored
        elif not is_chunk:
            req.append_token(token)
            if token in req.stop_ids:
                self._end(req, TokenOut(req.uid, token, "stop", None, logprobs, self._stop_reason(req, token)))
            elif req.num_tokens == req.max_device_len:
                self._end(req, TokenOut(req.uid, token, "length", None, logprobs))
            else:
                self._outs.append(TokenOut(req.uid, token, None, None, logprobs))

    def _stop_reason(self, req: Req, token: int) -> int | None:
        """The ``token`` that ended ``req``, if it is one that the user gave and not the model's own."""
        own = not req.sampling_params.ignore_eos and token in self._resources.eos_token_ids
        return None if own else token

    def _end(self, req: Req, last: TokenOut) -> None:
        """Announce the end of ``req``; what it holds comes back now, or after the pass in flight that it is part of."""
        self._outs.append(last)
        req.extra.outcome = last.finish_reason
        self._withdraw(req)
        if self._flight is not None and req.table_idx in self._flight.rows:
            self._zombies += 1
            self._ended[req.table_idx] = True
        else:
            self._release(req)

    def _withdraw(self, req: Req) -> None:
        """No further pass for ``req``."""
        if req is self._prefill.partial:
            self._prefill.partial = None
        else:
            self._decode.remove(req)

    def _release(self, req: Req) -> None:
        self._stops.remove(req.stop_ids)
        self._resources.release(req)
        del self._reqs[req.uid]
        self._waits_for_host -= req.sampling_params.reads_output
        self._prefill.unblock()
