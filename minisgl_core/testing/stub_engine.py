"""An engine without a model, for tests and timings of the scheduler.

:class:`StubEngine` keeps a pool of fake KV: slot -> the token id written there. A pass writes its tokens to the slots
that the page table names, as a model writes K and V. Then it reads each whole sequence back through the page table; the
next token is :func:`next_token` of what it read. A wrong slot, or a page shared by mistake, changes the tokens of a
request, and :func:`expected_tokens` gives the right ones without any scheduler. Decode reads its input from the device
state, as the real engine does, not from the host. A pass that writes where another one in flight may still read or
write raises RuntimeError.

:class:`NullEngine` always returns the same tokens and costs almost nothing: what remains is the scheduler's own time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minisgl_core.core import Batch, Req
from minisgl_core.kvcache import page_slots
from minisgl_core.plugin_api import mask_words

if TYPE_CHECKING:
    from minisgl_core.engine import TokenLogprobs

__all__ = ["NullEngine", "StubEngine", "allowed_token", "expected_tokens", "next_token"]

UNWRITTEN = -7
"""Content of a fake KV slot before its first token"""


@dataclass
class StubConfig:
    """The part of ``EngineConfig`` that the scheduler reads."""

    cache: str = "radix"
    max_prefill_tokens: int = 8192
    queue: str = "fifo"


def next_token(sequence: Sequence[int] | np.ndarray, vocab_size: int) -> int:
    """A number in [0, vocab_size) that depends on every token of ``sequence`` and on their order."""
    return zlib.crc32(np.asarray(sequence, dtype=np.int32).tobytes()) % vocab_size


def allowed_token(token: int, grammar: Any, vocab_size: int) -> int:
    """``token``, or the first one after it, round the vocabulary, that the state of an answer allows."""
    row = np.zeros(mask_words(vocab_size), dtype=np.int32)
    if not grammar.fill_mask(row):
        return token
    allowed = np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size]
    return int((token + np.flatnonzero(np.roll(allowed, -token))[0]) % vocab_size)


def expected_tokens(
    prompt: Sequence[int], count: int, vocab_size: int, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """The answer to ``prompt``: up to ``count`` tokens, ending with the first of ``stop_ids``."""
    sequence = list(prompt)
    answer: list[int] = []
    while len(answer) < count and not (answer and answer[-1] in stop_ids):
        answer.append(next_token(sequence, vocab_size))
        sequence.append(answer[-1])
    return answer


@dataclass
class StubOutput:
    """A launched pass. Its tokens may not be read before :meth:`wait`."""

    tokens: list[int]
    touched: np.ndarray
    """The slots that the pass reads or writes"""
    logprob_rows: list[TokenLogprobs | None] | None = None
    prompt_rows: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    waited: bool = False

    def wait(self) -> None:
        self.waited = True

    @property
    def next_tokens_cpu(self) -> torch.Tensor:
        if not self.waited:
            raise RuntimeError("the tokens were read before wait()")
        return torch.tensor(self.tokens, dtype=torch.int32)

    def logprobs(self) -> list[TokenLogprobs | None] | None:
        return self.logprob_rows

    def prompt_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        return self.prompt_rows


@dataclass
class _State:
    page_table: np.ndarray
    last_token: np.ndarray
    staged: list[tuple[int, int, np.ndarray]] = field(default_factory=list)

    def set_slots(self, table_idx: int, start: int, slots: np.ndarray) -> None:
        if slots.dtype != np.int32 or start + len(slots) > self.page_table.shape[1]:
            raise RuntimeError(f"row {table_idx}: {len(slots)} slots of {slots.dtype} at {start} do not fit")
        self.staged.append((table_idx, start, slots))

    def extend_slots(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, slots: np.ndarray) -> None:
        if counts.sum() != len(slots):
            raise RuntimeError(f"{len(slots)} slots for {counts.tolist()} places")
        first = 0
        for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
            self.set_slots(row, start, slots[first : first + count])
            first += count

    def flush(self) -> None:
        for table_idx, start, slots in self.staged:
            self.page_table[table_idx, start : start + len(slots)] = slots
        self.staged.clear()


class _Sampler:
    def prepare(self, batch: Batch) -> str:
        return "greedy"


class StubEngine:
    """Implements what the scheduler uses of an engine; see the module.

    ``nan_at(req, position) -> bool`` makes a row's logits NaN. ``seen`` records every batch as ``(phase, [(uid, tokens
    before, tokens after)])``.
    """

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 1,
        max_seq_len: int = 128,
        max_running_req: int = 8,
        vocab_size: int = 50,
        eos_token_ids: frozenset[int] = frozenset(),
        max_prefill_tokens: int = 8192,
        cache: str = "radix",
        queue: str = "fifo",
        nan_at: Callable[[Req, int], bool] | None = None,
    ) -> None:
        self.num_pages, self.page_size, self.max_seq_len = num_pages, page_size, max_seq_len
        self.max_running_req, self.vocab_size = max_running_req, vocab_size
        self.eos_token_ids = eos_token_ids
        self.config: Any = StubConfig(cache, max_prefill_tokens, queue)
        width = -(-max_seq_len // page_size) * page_size
        self.state = _State(
            np.full((max_running_req, width), -1, dtype=np.int32), np.full(max_running_req, UNWRITTEN, dtype=np.int32)
        )
        self.sampler = _Sampler()
        self.kv = np.full(num_pages * page_size, UNWRITTEN, dtype=np.int32)
        self.seen: list[tuple[str, list[tuple[int, int, int]]]] = []
        self._nan_at = nan_at
        self._in_flight: list[StubOutput] = []

    def distrust(self, pages: np.ndarray | None = None) -> None:
        """Wipe free pages; an error while a pass in flight uses one of them."""
        if pages is None:
            return
        slots = page_slots(pages, self.page_size)
        for out in self._in_flight:
            assert out.waited or not np.isin(slots, out.touched).any(), "a page is wiped that a pass in flight uses"
        self.kv[slots] = UNWRITTEN

    def launch(self, batch: Batch, mode: Any) -> StubOutput:
        self.state.flush()
        self.seen.append((batch.phase, [(req.uid, req.cached_len, req.device_len) for req in batch.reqs]))
        busy = [out.touched for out in self._in_flight if not out.waited]
        touched = np.concatenate([self.state.page_table[req.table_idx, : req.device_len] for req in batch.reqs])
        for req in batch.reqs:  # as in a model: the whole batch is stored before any row attends
            self._store(batch, req, busy)
        tokens = [self._read_and_sample(req) for req in batch.reqs]
        rows = [self._logprobs(req, token) for req, token in zip(batch.reqs, tokens, strict=True)]
        scores = self._score_prompts(batch) if batch.is_prefill else {}
        batch.complete_one()
        out = StubOutput(tokens, touched, rows if any(rows) else None, scores)
        self._in_flight = [*(out for out in self._in_flight if not out.waited), out]
        return out

    def finish(self, batch: Batch, step: StubOutput) -> StubOutput:
        if self._in_flight[-1] is not step:
            raise RuntimeError("another pass was launched before this one was finished")
        for row, req in enumerate(batch.reqs):
            if req.sampling_params.changes_logits and step.tokens[row] >= 0:
                step.tokens[row] = self._sample_again(req)
        return step

    def _sample_again(self, req: Req) -> int:
        """The next token, read from the tokens on the host. They must be complete, unless the Req has ended."""
        if req.num_tokens < req.device_len - 1 and req.extra.outcome is None:
            raise RuntimeError(f"{req} is finished before its last token was processed: {req.num_tokens} are known")
        token = next_token(req.tokens[: req.device_len - 1], self.vocab_size)
        if req.grammar is not None:
            token = allowed_token(token, req.grammar, self.vocab_size)
        self.state.last_token[req.table_idx] = token
        return token

    def _store(self, batch: Batch, req: Req, busy: list[np.ndarray]) -> None:
        row = self.state.page_table[req.table_idx]
        if batch.is_prefill:
            new = req.tokens[req.cached_len : req.device_len]
        elif req.extend_len == 1:
            new = self.state.last_token[req.table_idx : req.table_idx + 1]
        else:
            raise RuntimeError(f"{req} decodes {req.extend_len} tokens at once")
        if len(new) != req.extend_len:
            raise RuntimeError(f"{req} has {len(new)} tokens for {req.extend_len} places")
        slots = row[req.cached_len : req.device_len]
        if (slots < 0).any():
            raise RuntimeError(f"{req} writes to places of the page table that were never set")
        if any(np.isin(slots, touched).any() for touched in busy):
            raise RuntimeError(f"{req} writes to slots that a pass in flight may touch")
        self.kv[slots] = new

    def _read_and_sample(self, req: Req) -> int:
        sequence = self.kv[self.state.page_table[req.table_idx, : req.device_len]]
        token = next_token(sequence, self.vocab_size)
        self.state.last_token[req.table_idx] = token
        return -1 if self._nan_at is not None and self._nan_at(req, req.device_len) else token

    def _logprobs(self, req: Req, token: int) -> TokenLogprobs | None:
        if req.sampling_params.logprobs is None:
            return None
        from minisgl_core.engine import TokenLogprobs

        return TokenLogprobs(token, -0.5, [(token, -0.5)][: req.sampling_params.logprobs])

    def _score_prompts(self, batch: Batch) -> dict[int, list[TokenLogprobs]]:
        """A prompt token's log-probability is minus its position, or -99 if the pool holds anything else before it."""
        from minisgl_core.engine import TokenLogprobs

        found = {}
        for row, req in enumerate(batch.reqs):
            if req.sampling_params.prompt_logprobs is not None:
                places = range(req.cached_len + 1, min(req.device_len + 1, req.prompt_len))
                held = self.kv[self.state.page_table[req.table_idx, : req.device_len]]
                whole = np.array_equal(held, req.tokens[: req.device_len])
                found[row] = [TokenLogprobs(int(req.tokens[at]), -float(at) if whole else -99.0, []) for at in places]
        return found


class NullEngine(StubEngine):
    """Every row's next token is 1; nothing is stored."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._tokens = torch.ones(self.max_running_req, dtype=torch.int32)

    def launch(self, batch: Batch, mode: Any) -> Any:
        self.state.staged.clear()
        batch.complete_one()
        return _NullOutput(self._tokens[: batch.size])

    def finish(self, batch: Batch, step: Any) -> Any:
        return step


@dataclass
class _NullOutput:
    next_tokens_cpu: torch.Tensor

    def wait(self) -> None:
        return

    def logprobs(self) -> None:
        return None

    def prompt_logprobs(self) -> dict[int, Any]:
        return {}
