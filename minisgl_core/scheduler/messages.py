"""What goes into a scheduler and what comes out. Plain data: every tensor-parallel rank is sent the same messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from minisgl_core.core import SamplingParams
    from minisgl_core.engine import TokenLogprobs

__all__ = ["Abort", "ClearCache", "Finish", "FinishReason", "Message", "NewReq", "TokenOut"]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, eq=False)
class NewReq:
    """A prompt to serve: ``input_ids`` (N,) int32. No two live requests may share a ``uid``."""

    uid: int
    input_ids: np.ndarray
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody wants this request's tokens any more. An unknown uid is ignored: it may just have ended."""

    uid: int


@dataclass(frozen=True, slots=True)
class Finish:
    """A stop string was found in this request's text: as :class:`Abort`, but the finish reason is "stop"."""

    uid: int


@dataclass(frozen=True, slots=True)
class ClearCache:
    """Forget every cached prefix that no running Req uses."""


Message = NewReq | Abort | Finish | ClearCache


class TokenOut(NamedTuple):
    """One token of one request, or its end, or both. The token that made it stop is included.

    ``token`` is None when the end came without a token: refused, aborted, finished by a stop string, failed.
    """

    uid: int
    token: int | None
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: TokenLogprobs | None = None
