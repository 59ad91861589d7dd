"""The parser of models that neither reason nor call tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from minisgl_core.plugin_api import CallForm, Content, ParseRequest, ParserEvent, ParserSetup, TextParser, ToolFacts

__all__ = ["PlainParser"]


class PlainParser:
    """All text is content."""

    def __init__(self, setup: ParserSetup, options: object) -> None:
        """Needs neither."""

    def open(self, request: ParseRequest) -> TextParser:
        return _TEXT

    def special_tokens(self) -> Sequence[str]:
        return ()

    def call_form(self, tool: ToolFacts) -> CallForm | None:
        return None

    def close(self) -> None:
        """Nothing is held."""


class _PlainText:
    def push(self, text: str) -> Sequence[ParserEvent]:
        return [Content(text)] if text else []

    def finish(self) -> Sequence[ParserEvent]:
        return []


_TEXT: Final = _PlainText()
