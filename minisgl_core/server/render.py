"""From answers of the engine to JSON objects of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from minisgl_core.llm import Completion, TokenLogprob

__all__ = ["ChatShape", "CompletionShape", "usage"]


def usage(answers: Sequence[Completion]) -> dict[str, Any]:
    """Tokens of all answers together; a prompt with several choices counts once."""
    prompt = sum(answer.prompt_tokens for answer in answers)
    generated = sum(len(choice.token_ids) for answer in answers for choice in answer.choices or (answer,))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in answers)},
    }


def _logprob(value: float) -> float:
    """JSON has no infinity: OpenAI's API writes -9999 for a token that cannot come."""
    return max(value, -9999.0)


def _bytes(text: str) -> list[int] | None:
    """The bytes of a token; None for a part of a character, whose bytes the text does not have."""
    return None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode("utf-8"))


class CompletionShape:
    """Objects of ``/v1/completions``"""

    prefix: Final = "cmpl-"
    name = chunk_name = "text_completion"

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}
        """Characters of each choice that came before."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """Nothing comes before the first text."""
        return None

    def choice(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: Sequence[TokenLogprob] | None,
        stop_reason: int | str | None = None,
        *,
        first_unscored: str | None = None,
    ) -> dict[str, Any]:
        """``first_unscored``: the text of a prompt's first token, which nothing predicts and which comes before
        ``logprobs``.
        """
        scored = None if logprobs is None else self._logprobs(index, logprobs, first_unscored)
        return {"index": index, "text": text, "finish_reason": reason, "stop_reason": stop_reason, "logprobs": scored}

    def deltas(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: Sequence[TokenLogprob] | None,
        stop_reason: int | str | None,
    ) -> list[dict[str, Any]]:
        """One piece of a choice."""
        return [self.choice(index, text, reason, logprobs, stop_reason)]

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob], unscored: str | None) -> dict[str, Any]:
        first = [] if unscored is None else [unscored]
        tokens = first + [one.text for one in logprobs]
        offsets, at = [], self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(at)
            at += len(token)
        self._offsets[index] = at
        return {
            "tokens": tokens,
            "token_logprobs": [None] * len(first) + [_logprob(one.logprob) for one in logprobs],
            "top_logprobs": [None] * len(first) + [_top(one) for one in logprobs],
            "text_offset": offsets,
        }


def _top(one: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and the token itself, by their texts."""
    return {**{other.text: _logprob(other.logprob) for other in one.top}, one.text: _logprob(one.logprob)}


class ChatShape:
    """Objects of ``/v1/chat/completions``"""

    prefix: Final = "chatcmpl-"
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk that says who speaks."""
        return self.delta_of(index, {"role": "assistant", "content": ""}, None, None, None)

    def choice(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: Sequence[TokenLogprob] | None,
        stop_reason: int | str | None = None,
    ) -> dict[str, Any]:
        """A whole answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        scored = None if logprobs is None else _chat_logprobs(logprobs)
        reasons = {"finish_reason": reason, "stop_reason": stop_reason}
        return {"index": index, "message": message, **reasons, "logprobs": scored}

    def deltas(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: Sequence[TokenLogprob] | None,
        stop_reason: int | str | None,
    ) -> list[dict[str, Any]]:
        """One piece of a choice."""
        content = {"content": text} if text or reason is None else {}
        return [self.delta_of(index, content, reason, logprobs, stop_reason)]

    @staticmethod
    def delta_of(
        index: int,
        content: dict[str, Any],
        reason: str | None,
        logprobs: Sequence[TokenLogprob] | None,
        stop_reason: int | str | None,
    ) -> dict[str, Any]:
        """One piece with this content."""
        scored = None if logprobs is None else _chat_logprobs(logprobs)
        reasons = {"finish_reason": reason, "stop_reason": stop_reason}
        return {"index": index, "delta": content, **reasons, "logprobs": scored}


def _chat_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": [_chat_logprob(one) for one in logprobs], "refusal": None}


def _chat_logprob(one: TokenLogprob) -> dict[str, Any]:
    top = [{"token": o.text, "logprob": _logprob(o.logprob), "bytes": _bytes(o.text)} for o in one.top]
    return {"token": one.text, "logprob": _logprob(one.logprob), "bytes": _bytes(one.text), "top_logprobs": top}
