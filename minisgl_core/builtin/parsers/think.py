"""Reasoning between ``<think>`` and ``</think>``, as DeepSeek-R1, QwQ and Qwen3 write it.

Source: the chat templates of these models. Some open the reasoning at the end of the prompt, so that the answer has
the closing marker alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from minisgl_core.plugin_api import (
    CallForm,
    Content,
    ParseRequest,
    ParserEvent,
    ParserSetup,
    Reasoning,
    TextParser,
    ToolFacts,
    partial_marker,
)

__all__ = ["ThinkParser"]

_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"


class ThinkParser:
    """Reasoning is what comes first, up to the closing marker."""

    def __init__(self, setup: ParserSetup, options: object) -> None:
        """Needs neither."""

    def open(self, request: ParseRequest) -> TextParser:
        return _ThinkText(opened=request.prompt.rstrip().endswith(_OPEN))

    def special_tokens(self) -> Sequence[str]:
        return (_OPEN, _CLOSE)

    def call_form(self, tool: ToolFacts) -> CallForm | None:
        return None

    def close(self) -> None:
        """Nothing is held."""


class _ThinkText:
    def __init__(self, opened: bool) -> None:
        self._place: Literal["before", "reasoning", "content"] = "reasoning" if opened else "before"
        self._held = ""
        self._first = opened
        """White space that comes next follows a marker, and is no text."""

    def push(self, text: str) -> Sequence[ParserEvent]:
        self._held += text
        events: list[ParserEvent] = []
        if self._place == "before" and not self._begin():
            return events
        if self._place == "reasoning":
            events += self._reasoning()
        if self._place == "content":
            events += self._content()
        return events

    def finish(self) -> Sequence[ParserEvent]:
        held, self._held = self._held, ""
        if self._place == "reasoning":
            return [Reasoning(text)] if (text := held.rstrip()) else []
        return [Content(held)] if held and not self._first else []

    def _begin(self) -> bool:
        """Whether it is certain how the text begins."""
        begun = self._held.lstrip()
        if len(begun) < len(_OPEN) and _OPEN.startswith(begun):
            return False
        if begun.startswith(_OPEN):
            self._place, self._first, self._held = "reasoning", True, begun[len(_OPEN) :]
        else:
            self._place = "content"
        return True

    def _reasoning(self) -> list[ParserEvent]:
        end = self._held.find(_CLOSE)
        certain = len(self._held) - partial_marker(self._held, (_CLOSE,)) if end < 0 else end
        text = self._held[:certain].rstrip()
        self._held = self._held[len(text) if end < 0 else end + len(_CLOSE) :]
        if self._first:
            text = text.lstrip()
        self._first = self._first and not text
        if end >= 0:
            self._place, self._first = "content", True
        return [Reasoning(text)] if text else []

    def _content(self) -> list[ParserEvent]:
        text, self._held = self._held, ""
        if self._first:
            text = text.lstrip()
        self._first = self._first and not text
        return [Content(text)] if text else []
