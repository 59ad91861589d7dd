"""What a caller gets: answers, their pieces and log-probabilities, with named fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

if TYPE_CHECKING:
    from minisgl_core.scheduler import FinishReason

__all__ = ["Choice", "Chunk", "Completion", "TokenLogprob"]


class Alternative(NamedTuple):
    """A token that might have come at one place."""

    token_id: int
    text: str
    logprob: float


class TokenLogprob(NamedTuple):
    """A token of a prompt or an answer, with its natural-log probability under the model's own distribution, before
    temperature and penalties.
    """

    token_id: int
    text: str
    """The token by itself: a special token's name; U+FFFD for a part of a character."""
    logprob: float
    top: tuple[Alternative, ...] = ()
    """The likeliest tokens of this place, likeliest first"""

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return {**self._asdict(), "top": [one._asdict() for one in self.top]}


class Chunk(NamedTuple):
    """What is new of an answer. The text of a token may come later than the token: half a character, or the beginning
    of a stop string, is held back until it is certain.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    """Set in the last chunk of a choice only."""
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    """One entry per token, if they were requested."""
    stop_reason: int | str | None = None
    choice: int = 0
    """Which of the ``n`` choices goes on."""


class _Record(Mapping[str, Any]):
    """A dataclass whose fields are also read by key, as those of a dict; an optional field that is None has no key."""

    _optional: ClassVar[frozenset[str]] = frozenset()

    def __getitem__(self, name: str) -> Any:
        value = getattr(self, name) if name in self._names() else None
        if value is None and (name in self._optional or name not in self._names()):
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names() if name not in self._optional or getattr(self, name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cast("Any", cls)))

    def to_dict(self) -> dict[str, Any]:
        """As JSON data: plain dicts, lists, strings and numbers."""
        return {name: _plain(value) for name, value in self.items()}


@dataclass(frozen=True, repr=False, eq=False)
class Choice(_Record):
    """One answer to a prompt."""

    _optional: ClassVar[frozenset[str]] = frozenset({"logprobs", "error"})

    text: str
    token_ids: list[int]
    """A stop token included."""
    finish_reason: FinishReason | None
    """"stop": an end or stop token, or a stop string; "length": ``max_tokens`` or the context is used up; "error"."""
    stop_reason: int | str | None = None
    """The id of ``stop_token_ids`` or the string of ``stop`` that ended it; None for the model's own end token."""
    logprobs: list[TokenLogprob] | None = None
    """One entry per token, if they were requested."""
    error: str | None = None
    """What failed, for the reason "error"."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_shortened(self.text)}, {len(self.token_ids)} tokens, {self.finish_reason})"


@dataclass(frozen=True, repr=False, eq=False)
class Completion(Choice):
    """The answer to a prompt: ``answer.text``, ``answer["text"]`` and ``dict(answer)`` all work.

    With ``n`` above 1 the fields are those of the first choice, and ``choices`` has all of them.
    """

    _optional: ClassVar[frozenset[str]] = Choice._optional | {"prompt_logprobs", "choices"}

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had already."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """One entry for each token of the prompt but the first, which nothing predicts; if they were requested."""
    choices: tuple[Choice, ...] | None = None


def _shortened(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else f"{text[:most]}...")


def _plain(value: Any) -> Any:
    if isinstance(value, _Record | TokenLogprob):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
