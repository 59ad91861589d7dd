"""What goes into a scheduler and what comes out. Plain data: every tensor-parallel rank is sent the same messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from minisgl_core.core import SamplingParams
    from minisgl_core.engine import TokenLogprobs

__all__ = ["Abort", "ClearCache", "Finish", "FinishReason", "Message", "NewReq", "TokenOut", "TokenOuts", "TokenRun"]

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


class TokenRun(NamedTuple):
    """One token each for many requests, none of which ends with it."""

    uids: list[int]
    """Shared between steps: not to be changed."""
    tokens: list[int]


class TokenOuts:
    """What a step brought, in order: iterate for a :class:`TokenOut` each.

    ``parts`` says the same in fewer objects, for readers that deal with many requests.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: list[TokenOut | TokenRun]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[TokenOut]:
        for part in self.parts:
            if isinstance(part, TokenRun):
                yield from map(TokenOut, part.uids, part.tokens)
            else:
                yield part

    def __len__(self) -> int:
        return sum(len(part.uids) if isinstance(part, TokenRun) else 1 for part in self.parts)
