"""The scheduler's own records, and the engine as it sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from minisgl_core.core import Batch, Req, SamplingParams
    from minisgl_core.engine import TokenLogprobs
    from minisgl_core.kvcache import CacheHandle

    from .messages import FinishReason

__all__ = ["EngineLike", "Flight", "ForwardOutputLike", "PendingReq", "ReqState", "StateLike"]


@dataclass(slots=True, eq=False)
class PendingReq:
    """A request that waits to be admitted, for the first time or, preempted, again."""

    uid: int
    tokens: np.ndarray
    """(N,) int32: the prompt and what was generated before a preemption."""
    prompt_len: int
    output_len: int
    """Tokens it may still generate."""
    params: SamplingParams
    announced: bool = False
    """Was its :class:`PromptOut` sent? True as well for the choices that have none."""


@dataclass(slots=True, eq=False)
class ReqState:
    """``Req.extra``: what an admitted Req holds, beside its pages, and how it ended."""

    handle: CacheHandle
    announced: bool
    """As in :class:`PendingReq`."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the chunks so far, until they are all there."""
    outcome: FinishReason | None = None
    """Set when it has ended; a token that a pass in flight still brings for it is dropped."""
    poisoned: bool = False
    """Its logits were NaN, so its KV may be too."""


@dataclass(slots=True, eq=False)
class Flight:
    """A launched batch whose tokens have not been processed."""

    reqs: list[Req]
    uids: list[int]
    rows: np.ndarray
    """(B,) int64: each Req's ``table_idx``"""
    out: ForwardOutputLike
    plain: bool
    """Every row brings a token, and none of them its Req's last by length."""
    chunks: frozenset[int] = field(default_factory=frozenset)
    """Rows that prefilled a part of their prompt only: their sampled token means nothing."""


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
