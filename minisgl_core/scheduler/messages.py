"""What goes into a scheduler and what comes out. Plain data: every tensor-parallel rank is sent the same messages."""

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

    With ``params.n`` above 1 it becomes that many Reqs, with the uids ``uid``, ``uid + 1``, ...; each of them is
    answered, and may be finished, by itself. No two live Reqs may share a uid.
    """

    uid: int
    input_ids: np.ndarray
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody wants the tokens of these ``n`` Reqs, ``uid`` and those after it, any more.

    With the ``n`` of its :class:`NewReq` it ends a request with all of its choices. An unknown uid is ignored: it may
    just have ended.
    """

    uid: int
    n: int = 1


@dataclass(frozen=True, slots=True)
class Finish:
    """A stop string was found in this Req's text: as :class:`Abort`, but the finish reason is "stop"."""

    uid: int


@dataclass(frozen=True, slots=True)
class ClearCache:
    """Forget every cached prefix that no running Req uses."""


Message = NewReq | Abort | Finish | ClearCache


class PromptOut(NamedTuple):
    """What is known of a prompt: once per request, before its first token. Of several choices, the first one's.

    A request that is refused, or ends before it is admitted, has none.
    """

    uid: int
    cached_tokens: int
    """Tokens of the prompt that were found in the prefix cache when the request was first admitted."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each token of the prompt but the first; None if they were not requested."""


class TokenOut(NamedTuple):
    """One token of one Req, or its end, or both. The token that made it stop is included.

    ``token`` is None when the end came without a token: refused, aborted, finished by a stop string, failed, or only
    its prompt was to be scored.
    """

    uid: int
    token: int | None
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: TokenLogprobs | None = None
    stop_reason: int | None = None
    """The one of ``stop_token_ids`` that ended it; None if the model's own end token did, or something else."""


class TokenRun(NamedTuple):
    """One token each for many requests, none of which ends with it."""

    uids: list[int]
    """Shared between steps: not to be changed."""
    tokens: list[int]


class TokenOuts:
    """What a step brought, in order: iterate for a :class:`TokenOut` each.

    ``parts`` says the same in fewer objects, for readers that deal with many requests, and has the :class:`PromptOut`.
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
