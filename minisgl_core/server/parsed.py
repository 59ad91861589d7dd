"""Answers of ``/v1/chat/completions`` whose text has reasoning or tool calls in it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from minisgl_core.plugin_api import CallArguments, CallBegin, Content, Reasoning

from .render import ChatShape

if TYPE_CHECKING:
    from minisgl_core.llm import TokenLogprob
    from minisgl_core.plugin_api import ParserEvent

    from .parsing import AnswerParser

__all__ = ["ParsedChatShape", "call_id", "kept"]


def call_id(event: CallBegin) -> str:
    """The id of a call: the text's own, or a new one."""
    return event.id or f"call_{secrets.token_hex(12)}"


def kept(events: Sequence[ParserEvent], parallel: bool) -> list[ParserEvent]:
    """All events; without ``parallel`` those of the first call alone."""
    return [event for event in events if parallel or not getattr(event, "index", 0)]


class ParsedChatShape(ChatShape):
    """A shape with a parser for each choice."""

    def __init__(self, open_parser: Callable[[], AnswerParser], parallel: bool) -> None:
        self._open, self._parallel = open_parser, parallel
        self._states: dict[int, AnswerParser] = {}
        self._called: set[int] = set()
        """Choices that have called a tool."""

    def choice(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: Sequence[TokenLogprob] | None,
        stop_reason: int | str | None = None,
    ) -> dict[str, Any]:
        """A whole answer."""
        parser = self._open()
        events = kept([*parser.push(text), *parser.finish()], self._parallel)
        made = super().choice(index, "", reason, logprobs, stop_reason)
        message = made["message"]
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls = [_call(event) for event in events if isinstance(event, CallBegin)]
        for event in events:
            if isinstance(event, CallArguments):
                calls[event.index]["function"]["arguments"] += event.text
        message["content"] = content if content or not calls else None
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = calls
            made["finish_reason"] = _finish(reason, called=True)
        return made

    def deltas(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: Sequence[TokenLogprob] | None,
        stop_reason: int | str | None,
    ) -> list[dict[str, Any]]:
        """One piece of a choice; the reason of its end comes in a piece of its own."""
        parser = self._states.get(index)
        if parser is None:
            parser = self._states[index] = self._open()
        events = parser.push(text)
        if reason is not None:
            events += parser.finish()
        contents = [delta for event in kept(events, self._parallel) for delta in _deltas(event)]
        if any("tool_calls" in delta for delta in contents):
            self._called.add(index)
        if reason is not None or (logprobs and not contents):
            contents.append({})
        reasons = [None] * (len(contents) - 1) + [_finish(reason, called=index in self._called)]
        return [
            self.delta_of(index, content, end, logprobs if place == 0 else None, stop_reason if end else None)
            for place, (content, end) in enumerate(zip(contents, reasons, strict=bool(contents)))
        ]


def _finish(reason: str | None, *, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason


def _call(event: CallBegin) -> dict[str, Any]:
    return {"id": call_id(event), "type": "function", "function": {"name": event.name, "arguments": ""}}


def _deltas(event: ParserEvent) -> list[dict[str, Any]]:
    """The id and the name of a call come first, then its arguments."""
    match event:
        case Content(text):
            return [{"content": text}]
        case Reasoning(text):
            return [{"reasoning_content": text, "reasoning": text}]
        case CallBegin(index):
            return [{"tool_calls": [{"index": index, **_call(event)}]}]
        case CallArguments(index, text):
            return [{"tool_calls": [{"index": index, "function": {"arguments": text}}]}]
    return []
