"""One rank's scheduler: which Reqs the next pass serves, and what its tokens mean for them.

Every decision follows from the messages alone: no clock, no reading of free memory, no order of a set. So
tensor-parallel ranks that get the same messages before the same steps launch the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from minisgl_core.core import Batch, Req
from minisgl_core.env import ENV
from minisgl_core.errors import AdmissionError, EngineError
from minisgl_core.kvcache import CacheManager, IntegrityError, MatchLen, NaiveCache, RadixCache, match_len

from .batching import DecodeBatcher, PrefillBatcher
from .grammars import AnswerGrammars, ConstrainedRows
from .limits import Limits
from .records import (
    Abort,
    ClearCache,
    EngineLike,
    FinishReason,
    InFlightBatch,
    Message,
    NewReq,
    PendingReq,
    PromptOut,
    ReqState,
    SchedulerStats,
    TokenOut,
    TokenOuts,
    TokenRun,
)
from .request_queue import QUEUES
from .resources import Resources

if TYPE_CHECKING:
    from minisgl_core.engine import TokenLogprobs

__all__ = ["Scheduler"]

MAX_CONSECUTIVE_PREFILLS = 8
"""After this many prefill passes in a row the running Reqs get a decode pass, so that new prompts cannot stall them."""

_NAN_LOGITS = (
    "the model's logits for this request were NaN; with dtype=float16 try bfloat16 or float32, which overflow later; "
    "else try other backends, `minisgl verify` checks one"
)


class Scheduler:
    """Pass messages to :meth:`apply`, then call :meth:`step`, as long as :attr:`has_work`.

    With overlap a step launches its pass before it processes the tokens of the previous one. A Req that ends may
    therefore be part of one more pass: its token is dropped, and its row and pages are kept until it is processed.
    What the host adds to a pass, such as penalties, it adds after it has processed the previous one.
    """

    def __init__(
        self,
        engine: EngineLike,
        match_len: MatchLen = match_len,
        eos_token_ids: frozenset[int] = frozenset(),
        grammars: AnswerGrammars | None = None,
    ) -> None:
        """``match_len``: the ``kv`` role's. ``eos_token_ids``: further ones, in addition to the model config's.
        ``grammars`` None: requests with a grammar are refused.
        """
        config, size = engine.config, engine.page_size
        # A tokenizer may have more ids than the model.
        eos_token_ids = frozenset(token for token in eos_token_ids | engine.eos_token_ids if token < engine.vocab_size)
        self._queue = QUEUES[config.queue]()
        self.limits = Limits(
            engine.max_seq_len, engine.num_pages * size, engine.vocab_size, uses_priority=self._queue.uses_priority
        )
        cache = RadixCache(size, match_len) if config.cache == "radix" else NaiveCache()
        self._resources = Resources(
            CacheManager(engine.num_pages, size, cache),
            engine.max_running_req,
            self.limits.max_total_len,
            engine.vocab_size,
            eos_token_ids,
            engine.state,
            engine.distrust,
        )
        engine.distrust()
        self._prefill = PrefillBatcher(self._resources, self._queue, config.max_prefill_tokens)
        self._decode = DecodeBatcher(self._resources)
        self._constrained = ConstrainedRows(grammars, engine.max_running_req)
        self._engine = engine
        self._overlap = not ENV.DISABLE_OVERLAP_SCHEDULING.value
        self._check = ENV.CHECK_INTEGRITY.value
        self._pending: dict[int, PendingReq] = {}
        self._reqs: dict[int, Req] = {}
        self._in_flight: InFlightBatch | None = None
        self._outs: list[TokenOut | TokenRun | PromptOut] = []
        self._num_finished_in_flight = 0
        """Reqs that have ended but are part of the pass in flight."""
        self._finished_in_flight = np.zeros(engine.max_running_req, dtype=bool)
        """(R,) their rows"""
        self._steps = 0
        self._consecutive_prefills = 0
        self._preemptions = 0

    @property
    def has_work(self) -> bool:
        """False when a step would do nothing."""
        return bool(self._reqs or self._pending or self._in_flight or self._outs)

    @property
    def stats(self) -> SchedulerStats:
        manager = self._resources.manager
        evictable = manager.prefix_cache.evictable_pages
        return SchedulerStats(
            len(self._reqs),
            len(self._queue),
            manager.free_pages,
            evictable + manager.prefix_cache.protected_pages,
            evictable,
            self._resources.query_tokens,
            self._resources.hit_tokens,
            self._preemptions,
            self._constrained.seconds,
        )

    def check_integrity(self) -> None:
        """Raise :class:`~minisgl_core.kvcache.IntegrityError` unless every row and page is accounted for once, and
        nothing is kept of requests that have ended.
        """
        self._resources.check(self._reqs.values())
        if len(self._queue) != len(self._pending):
            raise IntegrityError(f"the queue holds {len(self._queue)} of {len(self._pending)} waiting requests")

    def clear_cache(self) -> None:
        """Drop all cached prefixes that no running Req uses."""
        self._resources.manager.clear_cache()

    def close(self) -> None:
        """Release the batches that refer to the engine's memory, before it is shut down."""
        self._in_flight, self._decode = None, DecodeBatcher(self._resources)

    # ---- messages ------------------------------------------------------------------------------------------------

    def apply(self, messages: Iterable[Message]) -> None:
        """Before a step: queue or refuse new requests; end others as soon as possible."""
        for message in messages:
            if isinstance(message, NewReq):
                self._add(message)
            elif isinstance(message, ClearCache):
                self.clear_cache()
            elif isinstance(message, Abort):
                for uid in range(message.uid, message.uid + message.n):
                    self._cancel(uid, "abort")
            elif message.error is None:
                self._cancel(message.uid, "stop")
            else:
                self._cancel(message.uid, "error", message.error)

    def take_notices(self) -> list[Message]:
        """After a step: messages to apply on all ranks, this one included, before the next one."""
        notices, self._constrained.notices = self._constrained.notices, []
        return notices

    def _add(self, new: NewReq) -> None:
        """Choices queue one after the other: the first publishes the prompt's pages, the others find them."""
        uids = range(new.uid, new.uid + new.params.n)
        for uid in uids:
            if uid in self._reqs or uid in self._pending:
                raise EngineError(f"request uid {uid} is in use", field="uid", value=uid)
        try:
            self.limits.check(new.input_ids, new.params, new.priority)
            self._constrained.check(new.params)
        except AdmissionError as error:
            self._outs += [TokenOut(uid, None, "error", str(error)) for uid in uids]
            return
        tokens = np.array(new.input_ids, dtype=np.int32)
        output_len = self.limits.output_len(len(tokens), new.params)
        for uid, params in zip(uids, new.params.choices(), strict=True):
            pending = PendingReq(uid, tokens, len(tokens), output_len, params, new.priority, self._steps)
            pending.prompt_out_sent = uid != new.uid
            self._constrained.begin(pending)
            self._pending[uid] = pending
            self._queue.add(pending)

    def _cancel(self, uid: int, reason: FinishReason, error: str | None = None) -> None:
        if (pending := self._pending.pop(uid, None)) is not None:
            self._queue.remove(pending)
            self._outs.append(TokenOut(uid, None, reason, error))
        elif (req := self._reqs.get(uid)) is not None and req.extra.outcome is None:
            self._end(req, TokenOut(uid, None, reason, error))

    # ---- one step ------------------------------------------------------------------------------------------------

    def step(self) -> TokenOuts:
        """Schedule and launch one pass, process the previous one, and finish the launched one, which may read the
        tokens that were processed. Without overlap, process it as well.
        """
        self._steps += 1
        engine = self._engine
        if (scheduled := self._schedule()) is not None:
            launched = engine.launch(scheduled.batch, engine.sampler.prepare(scheduled.batch))
        previous, self._in_flight = self._in_flight, scheduled
        if previous is not None:
            self._process(previous)
        if scheduled is not None:
            scheduled.out = engine.finish(scheduled.batch, launched)
        if not self._overlap:
            self._drain()
        if self._check:
            self.check_integrity()
        outs, self._outs = TokenOuts(self._outs), []
        return outs

    def _drain(self) -> None:
        """Process the pass in flight now."""
        previous, self._in_flight = self._in_flight, None
        if previous is not None:
            self._process(previous)

    # ---- schedule ------------------------------------------------------------------------------------------------

    def _schedule(self) -> InFlightBatch | None:
        """Choose the next batch; None if nothing can run before the pass in flight is processed."""
        if self._consecutive_prefills >= MAX_CONSECUTIVE_PREFILLS:
            self._consecutive_prefills = 0
            scheduled = self._schedule_decode() or self._schedule_prefill()
        else:
            # A decode pass that lacks pages drains the pass in flight. All Reqs may end there: then the queue fits.
            scheduled = self._schedule_prefill() or self._schedule_decode() or self._schedule_prefill()
        if scheduled is None and self._in_flight is None and (self._reqs or self._pending):
            raise EngineError(f"the scheduler is stuck: {self.stats}")
        return scheduled

    def _schedule_prefill(self) -> InFlightBatch | None:
        if not self._prefill.ready:
            return None
        chosen = self._prefill.next_batch(self._decode, self._on_admission)
        if chosen is None:
            return None
        self._consecutive_prefills += 1
        self._decode.invalidate()
        rows = np.array([req.table_idx for req in chosen.reqs], dtype=np.int64)
        batch = Batch(reqs=chosen.reqs, phase="prefill", table=self._resources.table, table_idx=rows)
        return InFlightBatch(batch, [req.uid for req in chosen.reqs], plain=False, chunks=chosen.chunks)

    def _on_admission(self, pending: PendingReq, req: Req) -> None:
        del self._pending[pending.uid]
        self._reqs[req.uid] = req
        self._constrained.add(req, pending)
        if not pending.prompt_out_sent and pending.params.prompt_logprobs is None:
            self._outs.append(PromptOut(req.uid, req.cached_len))
            pending.prompt_out_sent = True

    def _schedule_decode(self) -> InFlightBatch | None:
        if not self._decode.steps_until_refresh and not self._refresh_decode():
            return None
        self._consecutive_prefills = 0
        batch = self._decode.next_batch()
        return InFlightBatch(batch, self._decode.uids, plain=self._decode.steps_until_refresh > 0)

    def _refresh_decode(self) -> bool:
        """Form a decode batch of all Reqs that can go on. For want of pages, take some back or preempt a Req."""
        while (chosen := self._decode.unfinished()).any():
            if self._decode.refresh(chosen):
                return True
            if self._in_flight is not None:
                self._drain()  # some of its Reqs may end here; and no Req is preempted with a token in flight
            elif not self._resources.reclaim(self._admitted_rows()):
                self._preempt(self._prefill.partial or self._decode.running[-1])
        return False

    def _admitted_rows(self) -> np.ndarray:
        """(admitted,) int64: rows of the running Reqs, oldest first, and of the one whose prompt is partial."""
        partial = [] if self._prefill.partial is None else [self._prefill.partial.table_idx]
        return np.append(self._decode.rows, np.array(partial, dtype=np.int64))

    def _preempt(self, req: Req) -> None:
        """Put ``req``, the youngest, back at the head of the queue with its tokens, which are computed again later."""
        pending: PendingReq = req.extra.pending
        tokens, left = req.tokens.copy(), req.max_device_len - req.num_tokens
        self._unschedule(req)
        params = req.sampling_params
        if pending.prompt_out_sent and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # scored already
        pending = replace(pending, tokens=tokens, output_len=left, params=params)
        self._release(req)
        self._pending[req.uid] = pending
        self._queue.put_back(pending)
        self._preemptions += 1

    # ---- process -------------------------------------------------------------------------------------------------

    def _process(self, done: InFlightBatch) -> None:
        """Most rows yield a token and nothing else: these are handled together, the others one by one."""
        done.out.wait()
        for row, scores in done.out.prompt_logprobs().items():
            self._add_prompt_logprobs(done.batch.reqs[row], scores, row in done.chunks)
        tokens = done.out.next_tokens_cpu.numpy()
        logprobs = done.out.logprobs()
        special = self._special_rows(done, tokens)
        if logprobs is not None:
            special |= [entry is not None for entry in logprobs]
        if not special.any():
            self._append_tokens(done.uids, done.rows, tokens)
            return
        if not special.all():
            usual = ~special
            self._append_tokens(list(compress(done.uids, usual.tolist())), done.rows[usual], tokens[usual])
        for row in np.flatnonzero(special).tolist():
            req, token = done.batch.reqs[row], int(tokens[row])
            self._process_row(req, token, row in done.chunks, logprobs[row] if logprobs else None)

    def _add_prompt_logprobs(self, req: Req, scores: list[TokenLogprobs], is_chunk: bool) -> None:
        """Collect the log-probabilities of part of a prompt; send them once, when they are complete."""
        state: ReqState = req.extra
        state.prompt_logprobs += scores
        if not is_chunk and state.outcome is None:
            self._outs.append(PromptOut(req.uid, 0, state.prompt_logprobs))
            state.pending.prompt_out_sent = True

    def _special_rows(self, done: InFlightBatch, tokens: np.ndarray) -> np.ndarray:
        """(B,) bool: rows whose token may be their Req's last, or may have to be dropped."""
        rows, table = done.rows, self._resources.table
        special = self._resources.stops.contains(tokens)
        if self._num_finished_in_flight:
            special |= self._finished_in_flight[rows]
        if self._constrained.count:
            special |= self._constrained.among(rows)
        if not done.plain:
            special |= table.num_tokens[rows] + 1 >= table.max_device_len[rows]
            special[list(done.chunks)] = True
        return special

    def _append_tokens(self, uids: list[int], rows: np.ndarray, tokens: np.ndarray) -> None:
        """One more token for each of ``rows``."""
        self._resources.table.append_tokens(rows, tokens)
        self._outs.append(TokenRun(uids, tokens.tolist()))

    def _process_row(self, req: Req, token: int, is_chunk: bool, logprobs: TokenLogprobs | None) -> None:
        state: ReqState = req.extra
        if state.outcome is not None:
            state.has_nan |= token < 0
            self._num_finished_in_flight -= 1
            self._finished_in_flight[req.table_idx] = False
            self._release(req)
        elif token < 0:
            state.has_nan = True
            self._end(req, TokenOut(req.uid, None, "error", _NAN_LOGITS))
        elif not is_chunk and req.num_tokens == req.max_device_len:
            self._end(req, TokenOut(req.uid, None, "length"))  # only its prompt was to be scored
        elif not is_chunk:
            self._append_token(req, token, logprobs)

    def _append_token(self, req: Req, token: int, logprobs: TokenLogprobs | None) -> None:
        req.append_token(token)
        is_last = req.num_tokens == req.max_device_len
        if token in req.stop_ids:
            self._end(req, TokenOut(req.uid, token, "stop", None, logprobs, self._stop_reason(req, token)))
            return
        complete = req.grammar is not None and self._constrained.accept(req, token, is_last)
        if is_last:
            self._end(req, TokenOut(req.uid, token, "stop" if complete else "length", None, logprobs))
        else:
            self._outs.append(TokenOut(req.uid, token, None, None, logprobs))

    def _stop_reason(self, req: Req, token: int) -> int | None:
        """The ``token`` that ended ``req``, if it is one that the user gave and not the model's own."""
        own = not req.sampling_params.ignore_eos and token in self._resources.eos_token_ids
        return None if own else token

    def _end(self, req: Req, last: TokenOut) -> None:
        """Report the end of ``req``. Release it now, or if it is part of the pass in flight, after that pass."""
        self._outs.append(last)
        req.extra.outcome = last.finish_reason
        self._unschedule(req)
        if self._in_flight is not None and req.table_idx in self._in_flight.rows:
            self._num_finished_in_flight += 1
            self._finished_in_flight[req.table_idx] = True
        else:
            self._release(req)

    def _unschedule(self, req: Req) -> None:
        """Leave ``req`` out of all further passes."""
        if req is self._prefill.partial:
            self._prefill.partial = None
        else:
            self._decode.remove(req)

    def _release(self, req: Req) -> None:
        self._constrained.remove(req)
        self._resources.release(req)
        del self._reqs[req.uid]
        self._prefill.unblock()
