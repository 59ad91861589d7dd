"""The scheduler's own records, and the part of the engine that it uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from minisgl_core.core import Batch, SamplingParams
    from minisgl_core.engine import TokenLogprobs
    from minisgl_core.kvcache import CacheHandle

    from .messages import FinishReason

__all__ = ["EngineLike", "ForwardOutputLike", "InFlightBatch", "PendingReq", "ReqState", "StateLike"]


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
    """A scheduled batch whose tokens have not been processed. ``out`` is set when it is launched."""

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

    def forward_batch(self, batch: Batch, mode: Any) -> ForwardOutputLike: ...

    def distrust(self, pages: np.ndarray | None = None) -> None: ...
