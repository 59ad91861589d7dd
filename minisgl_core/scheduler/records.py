"""Messages into a scheduler, its output, its own records, and the part of the engine that it uses.

Messages and output are plain data: every tensor-parallel rank receives the same messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import torch

    from minisgl_core.core import Batch, SamplingParams
    from minisgl_core.engine import TokenLogprobs
    from minisgl_core.grammar import AnswerGrammar
    from minisgl_core.kvcache import CacheHandle

__all__ = [
    "Abort",
    "ClearCache",
    "EngineLike",
    "Finish",
    "FinishReason",
    "ForwardOutputLike",
    "InFlightBatch",
    "Message",
    "NewReq",
    "PendingReq",
    "PromptOut",
    "ReqState",
    "SchedulerStats",
    "StateLike",
    "TokenOut",
    "TokenOuts",
    "TokenRun",
]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, eq=False)
class NewReq:
    """A prompt to serve: ``input_ids`` (N,) int32.

    With ``params.n`` above 1 it becomes that many Reqs, with the uids ``uid``, ``uid + 1``, ...; each of them has an
    answer of its own, and may be finished separately. No two live Reqs may share a uid.
    """

    uid: int
    input_ids: np.ndarray
    params: SamplingParams
    priority: int = 0
    """Higher is admitted first, with the setting ``queue = "priority"``; other queues refuse a value other than 0."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End the ``n`` Reqs with the uids ``uid``, ``uid + 1``, ...: their tokens are no longer wanted.

    With the ``n`` of its :class:`NewReq` it ends a request with all of its choices. An unknown uid is ignored: its Req
    may just have ended.
    """

    uid: int
    n: int = 1


@dataclass(frozen=True, slots=True)
class Finish:
    """End a Req in whose text a stop string was found, or whose answer its grammar ends: like :class:`Abort`, with the
    finish reason "stop", or "error" if there is one.
    """

    uid: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ClearCache:
    """Drop every cached prefix that no running Req uses."""


Message = NewReq | Abort | Finish | ClearCache


class PromptOut(NamedTuple):
    """Facts about a prompt, sent once per request, before its first token, with the uid of its first choice.

    A request that is refused, or ends before it is admitted, has none.
    """

    uid: int
    cached_tokens: int
    """Tokens of the prompt that were found in the prefix cache when the request was first admitted."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each token of the prompt but the first; None if they were not requested."""


class TokenOut(NamedTuple):
    """One token of one Req, or its end, or both. The token that ends it is included.

    ``token`` is None where a Req ends without one: refused, aborted, finished by a stop string, failed, or with only
    its prompt to be scored.
    """

    uid: int
    token: int | None
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: TokenLogprobs | None = None
    stop_reason: int | None = None
    """The id of ``stop_token_ids`` that ended it; None if the model's end token or something else did."""


class TokenRun(NamedTuple):
    """One token each for many Reqs, none of which ends with it."""

    uids: list[int]
    """Shared between steps: do not change it."""
    tokens: list[int]


class TokenOuts:
    """The output of a step, in order. Iterating yields each token as a :class:`TokenOut`.

    ``parts`` has the same tokens in fewer objects, for readers that serve many requests, and each :class:`PromptOut`.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: list[TokenOut | TokenRun | PromptOut]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[TokenOut]:
        for part in self.parts:
            if isinstance(part, TokenRun):
                yield from map(TokenOut, part.uids, part.tokens)
            elif isinstance(part, TokenOut):
                yield part


class SchedulerStats(NamedTuple):
    """A snapshot of the scheduler; counters count from its start."""

    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    """Pages held by the prefix cache, in use or not."""
    evictable_pages: int
    """Those of them that no running request uses: they are freed when pages are needed."""
    query_tokens: int
    """Tokens of prompts that were looked up in the prefix cache."""
    hit_tokens: int
    """Those of them that were found."""
    preemptions: int
    grammar_s: float
    """Seconds spent on grammars: compiling, advancing, filling masks."""


# ---- the scheduler's own records -------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class PendingReq:
    """A request that waits to be admitted, for the first time or, after a preemption, again."""

    uid: int
    tokens: np.ndarray
    """(N,) int32: the prompt, and what was generated before a preemption."""
    prompt_len: int
    output_len: int
    """Tokens it may still generate."""
    params: SamplingParams
    priority: int = 0
    arrival_step: int = 0
    """The number of scheduler steps before it arrived."""
    prompt_out_sent: bool = False
    """Whether its :class:`PromptOut` was sent. True as well for choices that have none."""
    grammar: AnswerGrammar | None = None
    """The state of its answer, on rank 0. A preemption does not change it."""


@dataclass(slots=True, eq=False)
class ReqState:
    """``Req.extra``: what an admitted Req holds besides its pages, and how it ended."""

    handle: CacheHandle
    pending: PendingReq
    """The request as it was admitted."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Scores of the chunks computed so far, until they are complete."""
    outcome: FinishReason | None = None
    """Set when it has ended. A token that a pass in flight still computes for it is dropped."""
    has_nan: bool = False
    """Its logits were NaN, so its KV may be as well."""


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A scheduled batch whose tokens have not been processed. ``out`` is set when its pass is finished."""

    batch: Batch
    uids: list[int]
    plain: bool
    """Every row yields a token, and none of them is its Req's last by length."""
    chunks: frozenset[int] = frozenset()
    """Rows that prefilled only part of their prompt: their sampled token means nothing."""
    out: ForwardOutputLike = field(init=False)

    @property
    def rows(self) -> np.ndarray:
        """(B,) int64: each Req's ``table_idx``"""
        assert self.batch.table_idx is not None
        return self.batch.table_idx


class ForwardOutputLike(Protocol):
    """The part of ``engine.ForwardOutput`` that is used here."""

    @property
    def next_tokens_cpu(self) -> torch.Tensor: ...

    def wait(self) -> None: ...

    def logprobs(self) -> list[TokenLogprobs | None] | None: ...

    def prompt_logprobs(self) -> dict[int, list[TokenLogprobs]]: ...


class StateLike(Protocol):
    """The part of ``engine.DecodeState`` that is used here."""

    def set_slots(self, table_idx: int, start: int, slots: np.ndarray) -> None: ...

    def extend_slots(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, slots: np.ndarray) -> None: ...


class _Sampler(Protocol):
    def prepare(self, batch: Batch) -> Any: ...


class EngineLike(Protocol):
    """The part of ``engine.Engine`` that is used here."""

    page_size: int
    num_pages: int
    max_seq_len: int
    max_running_req: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    @property
    def state(self) -> StateLike: ...

    @property
    def sampler(self) -> _Sampler: ...

    @property
    def config(self) -> Any: ...

    def launch(self, batch: Batch, mode: Any) -> Any: ...

    def finish(self, batch: Batch, step: Any) -> ForwardOutputLike: ...

    def distrust(self, pages: np.ndarray | None = None) -> None: ...
