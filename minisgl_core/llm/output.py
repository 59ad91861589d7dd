"""From a request's tokens to what its user sees: text, stop strings, the reason it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from minisgl_core.tokenizer import StopMatcher

if TYPE_CHECKING:
    from minisgl_core.core import SamplingParams
    from minisgl_core.scheduler import FinishReason, TokenOut
    from minisgl_core.tokenizer import Tokenizer

__all__ = ["Chunk", "Output"]


class Chunk(NamedTuple):
    """What is new of an answer. The text of a token may come later than the token: half a character, or the beginning
    of a stop string, is held back until it is certain.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    """Set in the last chunk only."""
    error: str | None
    logprobs: list[dict[str, Any]] | None
    """One entry per token, if they were asked for."""


class Output:
    """Collects the answer to one prompt.

    Tokens become text when somebody asks for it or the answer ends; with stop strings, at once.
    """

    def __init__(self, uid: int, prompt_tokens: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.uid = uid
        self.prompt_tokens = prompt_tokens
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.logprobs: list[dict[str, Any]] | None = None if params.logprobs is None else []
        self._decoder = tokenizer.new_decoder() if tokenizer is not None else None
        self._stop = StopMatcher(params.stop)
        self._at_once = bool(params.stop)
        self._text: list[str] = []
        self._decoded = self._taken_text = self._taken_tokens = 0

    @property
    def text(self) -> str:
        self._decode(len(self.token_ids))
        return "".join(self._text)

    def add_token(self, token: int) -> bool:
        """Take in one more token; True where it is news to the scheduler that a stop string ends this."""
        if self.finish_reason is not None:
            return False  # a stop string has ended it; this pass was under way already
        self.token_ids.append(token)
        if self._at_once and self._decode(len(self.token_ids)):
            self.finish_reason = "stop"
            return True
        return False

    def add(self, out: TokenOut) -> bool:
        """As :meth:`add_token`, with whatever else the scheduler has to say."""
        if self.finish_reason is not None:
            return False
        if out.token is not None:
            if out.finish_reason is None and out.logprobs is None:
                return self.add_token(out.token)
            self.token_ids.append(out.token)
            if self.logprobs is not None and out.logprobs is not None:
                self.logprobs.append(out.logprobs._asdict())
        stop_token = out.token is not None and out.finish_reason == "stop"  # its text is no part of the answer
        stopped = self._decode(len(self.token_ids) - stop_token, end=out.finish_reason is not None)
        self._decoded = len(self.token_ids)
        self.finish_reason = "stop" if stopped else out.finish_reason
        self.error = out.error
        return stopped and out.finish_reason is None

    def _decode(self, count: int, end: bool = False) -> bool:
        """The text of the first ``count`` tokens, and with the ``end`` what is still held; True where a stop string is
        complete.
        """
        if self._decoder is None:
            return False
        text = "".join(map(self._decoder.push, self.token_ids[self._decoded : count]))
        self._decoded = max(self._decoded, count)
        if end:
            text += self._decoder.flush()
        certain = self._stop.push(text)
        if end:
            certain += self._stop.flush()
        if certain:
            self._text.append(certain)
        return self._stop.stopped

    def take(self) -> Chunk | None:
        """What has come since the last call; None if nothing has."""
        self._decode(len(self.token_ids))
        text, tokens = self._text[self._taken_text :], self.token_ids[self._taken_tokens :]
        if not (text or tokens or self.finish_reason):
            return None
        logprobs = None if self.logprobs is None else self.logprobs[self._taken_tokens :]
        self._taken_text, self._taken_tokens = len(self._text), len(self.token_ids)
        return Chunk("".join(text), tokens, self.finish_reason, self.error, logprobs)

    def answer(self) -> dict[str, Any]:
        """All of it, as :meth:`LLM.generate` gives it."""
        answer: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
        }
        if self.logprobs is not None:
            answer["logprobs"] = self.logprobs
        if self.error is not None:
            answer["error"] = self.error
        return answer
