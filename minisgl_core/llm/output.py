"""From a Req's tokens to what its user sees: text, stop strings, the reason it ended."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minisgl_core.tokenizer import StopMatcher

from .answers import Alternative, Choice, Chunk, Completion, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from minisgl_core.core import SamplingParams
    from minisgl_core.engine import TokenLogprobs
    from minisgl_core.scheduler import FinishReason, TokenOut
    from minisgl_core.tokenizer import Tokenizer

__all__ = ["Output", "PromptFacts", "completion"]


@dataclass(slots=True)
class PromptFacts:
    """What the choices of a request have in common."""

    num_tokens: int
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None


class Output:
    """Collects one answer to one prompt.

    The engine's thread adds tokens while another reads. Tokens become text in the reader's thread, when it wants text;
    but with stop strings in the engine's, at once. ``finish_reason`` is set last: with it all else is there.
    """

    __slots__ = (
        "_at_once",
        "_decoded",
        "_decoder",
        "_flushed",
        "_logprobs",
        "_min_tokens",
        "_silent_from",
        "_stop",
        "_taken_text",
        "_taken_tokens",
        "_text",
        "_tokenizer",
        "choice",
        "error",
        "finish_reason",
        "prompt",
        "stop_reason",
        "token_ids",
        "watched",
    )

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        prompt: PromptFacts,
        choice: int = 0,
        input_ids: Sequence[int] | np.ndarray = (),
    ) -> None:
        """``input_ids``: the prompt, whose text the answer's continues."""
        self.prompt = prompt
        self.choice = choice
        """Which of the choices of its request."""
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.watched = False
        """A reader waits for whatever comes next."""
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._tokenizer = tokenizer
        self._decoder = tokenizer.new_decoder(input_ids) if tokenizer is not None else None
        self._stop = StopMatcher(params.stop)
        self._at_once = bool(params.stop)
        self._min_tokens = params.min_tokens
        """In the text of these no stop string is looked for."""
        self._silent_from = sys.maxsize
        """The index of the stop token that ended it, whose text is not part of the answer."""
        self._text: list[str] = []
        self._decoded = self._taken_text = self._taken_tokens = 0
        self._flushed = False

    # ---- the engine's thread -------------------------------------------------------------------------------------

    def add_token(self, token: int) -> bool:
        """One more token. True where it is news to the scheduler that a stop string ends this."""
        if self.finish_reason is not None:
            return False  # a stop string has ended it; this pass was under way already
        self.token_ids.append(token)
        if self._at_once and self._decode():
            self.stop_reason = self._stop.matched
            self.finish_reason = "stop"
            return True
        return False

    def add(self, out: TokenOut) -> bool:
        """As :meth:`add_token`, with whatever else the scheduler has to say."""
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
        """The text of the tokens that are there, and with the ``end`` what is still held; True where a stop string is
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
        """The text that one more token lets out, where stop strings are looked for."""
        assert self._tokenizer is not None and self._decoder is not None
        special = self._tokenizer.special_text(token)
        return self._stop.push(self._decoder.push(token)) if special is None else self._stop.push_special(special)

    # ---- the reader's thread -------------------------------------------------------------------------------------

    def _catch_up(self) -> FinishReason | None:
        """Text for all tokens that are there. Returns the finish reason as it was before."""
        reason = self.finish_reason
        if not self._at_once:
            self._decode(end=reason is not None)
        return reason

    @property
    def has_news(self) -> bool:
        """Is there anything that :meth:`take` has not returned?"""
        return self.finish_reason is not None or len(self.token_ids) > self._taken_tokens

    def take(self) -> Chunk | None:
        """What has come since the last call; None if nothing has."""
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
        """Those of a :class:`Choice`, as far as the answer has come."""
        reason = self._catch_up()
        text, tokens = "".join(self._text), self.token_ids[:]  # the engine goes on appending to its own list
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
