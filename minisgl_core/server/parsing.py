"""The parsers of a model: what makes reasoning, content and tool calls of the text of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from minisgl_core.plugin_api import Content, ParseRequest, ParserSetup, ToolFacts
from minisgl_core.registry import build

from .errors import APIError
from .tools import NamedTool

if TYPE_CHECKING:
    import numpy as np

    from minisgl_core.llm import AsyncLLM
    from minisgl_core.plugin_api import Parser, ParserEvent, ParserPart, TextParser

    from .tools import ToolRequest

__all__ = ["AnswerParser", "Parsers", "facts_of"]

_PROMPT_END: Final = 16
"""Tokens of the prompt that parsers see."""
_NONE: Final = "none"


class Parsers:
    """Built once for a model."""

    def __init__(self, llm: AsyncLLM) -> None:
        tokenizer = llm.tokenizer
        template = None if tokenizer is None else tokenizer.chat_template
        setup = ParserSetup("" if template is None else template.text)
        self._tokenizer = tokenizer
        self.reasoning = self._build(llm, "reasoning", setup)
        self.tools = self._build(llm, "tools", setup)
        """None where nothing is to be parsed."""

    @staticmethod
    def _build(llm: AsyncLLM, part: ParserPart, setup: ParserSetup) -> Parser | None:
        choice = llm.plan.choice("parser", op=part)
        found: Parser | None = None if choice.name == _NONE else build(choice, setup)
        return found

    def shown(self, with_tools: bool) -> frozenset[int]:
        """Special tokens that the parsers of an answer have to see."""
        used = [self.reasoning, self.tools if with_tools else None]
        texts = [text for parser in used if parser is not None for text in parser.special_tokens()]
        return self._tokenizer.special_ids(texts) if self._tokenizer is not None else frozenset()

    def check_template(self, name: str | None) -> None:
        """Raise :class:`APIError` if the chat template would leave out the tools. ``name``: as the body has it."""
        template = None if self._tokenizer is None else self._tokenizer.chat_template
        if template is not None and not template.reads_tools(name):
            message = "the model's chat template does not read `tools`; describe them in the system message"
            raise APIError(400, message, param="tools", code="unsupported")

    def request(self, prompt: np.ndarray, tools: Sequence[ToolFacts]) -> ParseRequest:
        """What the parsers know of a request. ``prompt``: (N,) its token ids."""
        end = [] if self._tokenizer is None else [self._tokenizer.token_text(int(i)) for i in prompt[-_PROMPT_END:]]
        return ParseRequest("".join(end), tools)

    def open(self, request: ParseRequest) -> AnswerParser:
        """The state before the first text of an answer; calls are looked for if the request has tools."""
        used = [self.reasoning, self.tools if request.tools else None]
        return AnswerParser([parser.open(request) for parser in used if parser is not None])


class AnswerParser:
    """Parsers in a row: each gets the content that the one before it leaves."""

    def __init__(self, parsers: Sequence[TextParser]) -> None:
        self._parsers = parsers

    def push(self, text: str) -> list[ParserEvent]:
        """The events that are certain with one more piece of the text."""
        return self._push([Content(text)] if text else [], self._parsers)

    def finish(self) -> list[ParserEvent]:
        """The events of what is still held."""
        events: list[ParserEvent] = []
        for place, parser in enumerate(self._parsers):
            events += self._push(parser.finish(), self._parsers[place + 1 :])
        return events

    def _push(self, events: Sequence[ParserEvent], parsers: Sequence[TextParser]) -> list[ParserEvent]:
        for parser in parsers:
            found: list[Any] = []
            for event in events:
                found += parser.push(event.text) if isinstance(event, Content) else [event]
            events = found
        return list(events)


def facts_of(body: ToolRequest, parser: Parser | None) -> list[ToolFacts]:
    """The tools as parsers know them. Raises :class:`APIError` for what cannot be served, by name."""
    tools = [ToolFacts(tool.function.name, tool.function.parameters or {}) for tool in body.offered]
    if tools and parser is None:
        message = "no parser of tool calls is chosen for this model; name one with --backend parser.tools=NAME"
        raise APIError(400, message, param="tools", code="unsupported")
    if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
        message = '`tool_choice` can only be "auto" or "none" here: constrained output is not available'
        raise APIError(400, message, param="tool_choice", code="unsupported")
    if any(tool.function.strict for tool in body.offered):
        message = "`strict` of a function is not supported: constrained output is not available; leave it out"
        raise APIError(400, message, param="tools", code="unsupported")
    return tools
