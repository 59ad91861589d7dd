"""Input and output of a scheduler, as plain data: every tensor-parallel rank receives the same messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from minisgl_core.core import SamplingParams
    from minisgl_core.engine import TokenLogprobs

__all__ = [
    "Abort",
    "ClearCache",
    "Finish",
    "FinishReason",
    "Message",
    "NewReq",
    "PromptOut",
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
    """End a Req in whose text a stop string was found: like :class:`Abort`, with the finish reason "stop"."""

    uid: int


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
