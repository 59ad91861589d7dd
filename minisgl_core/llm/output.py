"""What a caller receives, and how a Req's tokens become it: text, stop strings, the reason an answer ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from minisgl_core.tokenizer import StopMatcher

if TYPE_CHECKING:
    import numpy as np

    from minisgl_core.core import SamplingParams
    from minisgl_core.engine import TokenLogprobs
    from minisgl_core.scheduler import FinishReason, TokenOut
    from minisgl_core.tokenizer import Tokenizer

__all__ = ["Choice", "Chunk", "Completion", "Output", "PromptFacts", "TokenLogprob", "completion"]


class Alternative(NamedTuple):
    """A token that could have been chosen at one position."""

    token_id: int
    text: str
    logprob: float


class TokenLogprob(NamedTuple):
    """A token of a prompt or an answer, with its natural-log probability in the model's distribution, before
    temperature and penalties.
    """

    token_id: int
    text: str
    """Text of the token alone: a special token's name; U+FFFD for part of a character."""
    logprob: float
    top: tuple[Alternative, ...] = ()
    """The most likely tokens at this position, in order."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {**self._asdict(), "top": [one._asdict() for one in self.top]}


class Chunk(NamedTuple):
    """A new part of an answer. The text of a token may arrive later than the token: half a character, or the beginning
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
    """Which of the ``n`` choices this is part of."""


class _Record(Mapping[str, Any]):
    """A dataclass whose fields can also be read by key, like a dict's. An optional field that is None has no key."""

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
        """Return JSON data: plain dicts, lists, strings and numbers."""
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
    """Tokens of the prompt that were in the prefix cache."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """One entry for each token of the prompt but the first, which nothing predicts; if they were requested."""
    choices: tuple[Choice, ...] | None = None


def _shortened(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else f"{text[:most]}...")


def _plain(value: Any) -> Any:
    if isinstance(value, _Record | TokenLogprob):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(slots=True)
class PromptFacts:
    """What the choices of a request share."""

    num_tokens: int
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    scheduled_s: float | None = None
    """When the engine reported that it had begun with the prompt, by ``time.perf_counter``."""


class Output:
    """Collects one answer to one prompt.

    The engine's thread adds tokens while another one reads. Tokens become text in the reader's thread, on demand; with
    stop strings, in the engine's thread, at once. ``finish_reason`` is set last: everything else is there by then.
    """

    __slots__ = (
        "_at_once",
        "_decoded",
        "_decoder",
        "_flushed",
        "_logprobs",
        "_min_tokens",
        "_shown",
        "_silent_from",
        "_stop",
        "_taken_text",
        "_taken_tokens",
        "_text",
        "_tokenizer",
        "awaited",
        "choice",
        "error",
        "finish_reason",
        "prompt",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        prompt: PromptFacts,
        choice: int = 0,
        input_ids: Sequence[int] | np.ndarray = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """``input_ids``: the prompt, whose text the answer continues. ``shown``: special tokens that have a text."""
        self.prompt = prompt
        self.choice = choice
        """Number of this choice in its request."""
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.awaited = False
        """A reader waits for the next token."""
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._tokenizer = tokenizer
        self._decoder = tokenizer.new_decoder(input_ids, shown) if tokenizer is not None else None
        self._stop = StopMatcher(params.stop)
        self._at_once = bool(params.stop)
        self._shown = shown
        self._min_tokens = params.min_tokens
        """Stop strings are not searched for in the text of this many tokens."""
        self._silent_from = sys.maxsize
        """Index of the stop token that ended it, whose text is not part of the answer."""
        self._text: list[str] = []
        self._decoded = self._taken_text = self._taken_tokens = 0
        self._flushed = False

    # ---- the engine's thread -------------------------------------------------------------------------------------

    def add_token(self, token: int) -> bool:
        """Add a token. True if a stop string ends the answer here, which the scheduler does not know yet."""
        if self.finish_reason is not None:
            return False  # a stop string has ended it while this pass was in flight
        self.token_ids.append(token)
        if self._at_once and self._decode():
            self.stop_reason = self._stop.matched
            self.finish_reason = "stop"
            return True
        return False

    def add(self, out: TokenOut) -> bool:
        """Like :meth:`add_token`, with all that the scheduler reports."""
        if self.finish_reason is not None:
            return False
        if self._logprobs is not None and out.logprobs is not None:
            self._logprobs.append(out.logprobs)
        if out.finish_reason is None:
            return out.token is not None and self.add_token(out.token)
        if out.token is not None:
            if out.finish_reason == "stop":
                self._silent_from = len(self.token_ids)  # set first: a reader may decode as soon as the token is there
            self.token_ids.append(out.token)
        self.error = out.error
        stopped = self._at_once and self._decode(end=True)
        self.stop_reason = self._stop.matched if stopped else out.stop_reason
        self.finish_reason = "stop" if stopped else out.finish_reason
        return False

    def _decode(self, end: bool = False) -> bool:
        """Decode the tokens that are there, and at the ``end`` the text that is held back; True if a stop string is
        complete.
        """
        if self._decoder is None or self._flushed:
            return self._stop.stopped
        tokens = self.token_ids[self._decoded :]
        del tokens[max(0, self._silent_from - self._decoded) :]
        early = max(0, self._min_tokens - self._decoded) if self._at_once else 0
        self._decoded += len(tokens)
        certain = "".join(map(self._decoder.push, tokens[:early]))
        if self._at_once:
            certain += "".join(map(self._match, tokens[early:]))
        else:
            certain += "".join(map(self._decoder.push, tokens))
        if end:
            self._flushed = True
            certain += self._stop.push(self._decoder.flush()) + self._stop.flush()
        if certain:
            self._text.append(certain)
        return self._stop.stopped

    def _match(self, token: int) -> str:
        """The text that becomes certain with one more token, where stop strings are searched for."""
        assert self._tokenizer is not None and self._decoder is not None
        special = None if token in self._shown else self._tokenizer.special_text(token)
        return self._stop.push(self._decoder.push(token)) if special is None else self._stop.push_special(special)

    # ---- the reader's thread -------------------------------------------------------------------------------------

    def _catch_up(self) -> FinishReason | None:
        """Decode all tokens that are there. Returns the finish reason as it was before."""
        reason = self.finish_reason
        if not self._at_once:
            self._decode(end=reason is not None)
        return reason

    @property
    def has_unread(self) -> bool:
        """Whether there is anything that :meth:`take` has not returned."""
        return self.finish_reason is not None or len(self.token_ids) > self._taken_tokens

    def take(self) -> Chunk | None:
        """The part that is new since the last call; None if nothing is."""
        reason = self._catch_up()
        texts, tokens = self._text[self._taken_text :], self.token_ids[self._taken_tokens :]
        if not (texts or tokens or reason):
            return None
        logprobs = None
        if self._logprobs is not None:
            end = self._taken_tokens + len(tokens)
            logprobs = _with_text(self._logprobs[self._taken_tokens : end], self._tokenizer)
        self._taken_text += len(texts)
        self._taken_tokens += len(tokens)
        stop_reason = self.stop_reason if reason else None
        return Chunk("".join(texts), tokens, reason, self.error, logprobs, stop_reason, self.choice)

    def fields(self) -> dict[str, Any]:
        """Fields of a :class:`Choice`, from the answer so far."""
        reason = self._catch_up()
        text, tokens = "".join(self._text), self.token_ids[:]  # the engine keeps appending to its own list
        logprobs = None if self._logprobs is None else _with_text(self._logprobs[: len(tokens)], self._tokenizer)
        return {
            "text": text,
            "token_ids": tokens,
            "finish_reason": reason,
            "stop_reason": self.stop_reason,
            "logprobs": logprobs,
            "error": self.error,
        }


def completion(outputs: Sequence[Output], tokenizer: Tokenizer | None) -> Completion:
    """The answer to one prompt, whose choices are ``outputs``."""
    prompt, first = outputs[0].prompt, outputs[0].fields()
    logprobs = None if prompt.logprobs is None else _with_text(prompt.logprobs, tokenizer)
    choices = None if len(outputs) == 1 else (Choice(**first), *(Choice(**other.fields()) for other in outputs[1:]))
    return Completion(
        **first,
        prompt_tokens=prompt.num_tokens,
        cached_tokens=prompt.cached_tokens,
        prompt_logprobs=logprobs,
        choices=choices,
    )


def _with_text(found: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> list[TokenLogprob]:
    """The engine's log-probabilities, with the text of each token; empty texts without a tokenizer."""

    def text(token: int) -> str:
        return "" if tokenizer is None else tokenizer.token_text(token)

    return [
        TokenLogprob(
            one.token,
            text(one.token),
            one.logprob,
            tuple(Alternative(token, text(token), logprob) for token, logprob in one.top),
        )
        for one in found
    ]
