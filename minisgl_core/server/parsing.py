"""The parsers of a model: what makes reasoning, content and tool calls of the text of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from minisgl_core.plugin_api import Content, Grammar, GrammarError, ParseRequest, ParserSetup, Reasoning, ToolFacts
from minisgl_core.registry import build

from .errors import APIError
from .tools import NamedTool

if TYPE_CHECKING:
    import numpy as np

    from minisgl_core.llm import AsyncLLM
    from minisgl_core.plugin_api import CallForm, Parser, ParserEvent, ParserPart, TextParser

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

    def grammar(self, body: ToolRequest, request: ParseRequest, parallel: bool) -> Grammar | None:
        """What keeps an answer to the calls that the request demands; None if it demands none.

        Raises :class:`APIError` for a parser whose calls are no JSON, and for reasoning that a demanded call would
        have to interrupt.
        """
        choice, strict = body.tool_choice, {tool.function.name for tool in body.offered if tool.function.strict}
        demanded = choice == "required" or isinstance(choice, NamedTool)
        if not request.tools or not (demanded or strict):
            return None
        assert self.tools is not None
        if demanded and self._reasons(request):
            message = "a call cannot be demanded of a model that is reasoning; turn that off in `chat_template_kwargs`"
            raise APIError(400, message, param="tool_choice", code="unsupported")
        named = choice.function.name if isinstance(choice, NamedTool) else None
        structures: list[dict[str, Any]] = []
        for tool in request.tools:
            if named in (None, tool.name):
                form = self._form(tool, "tool_choice" if demanded else "tools")
                bound = tool.parameters if demanded or tool.name in strict else {}
                structures.append({"begin": form.begin, "schema": {"type": "object", **bound}, "end": form.end})
        flags = {"at_least_one": demanded, "stop_after_first": demanded and (named is not None or not parallel)}
        try:
            return Grammar.structural_tag(structures, [self._trigger(structures[0]["begin"])], **flags)
        except GrammarError as error:
            raise APIError(400, f"the parameters of a tool cannot be used: {error}", param="tools") from error

    def _reasons(self, request: ParseRequest) -> bool:
        """Whether the prompt has opened the reasoning."""
        if self.reasoning is None:
            return False
        return any(isinstance(event, Reasoning) for event in self.reasoning.open(request).push("x y"))

    def _form(self, tool: ToolFacts, field: str) -> CallForm:
        assert self.tools is not None
        form = self.tools.call_form(tool)
        if form is None:
            message = f"`{field}` cannot demand calls of this model: their form is no JSON, which grammars are about"
            raise APIError(400, message, param=field, code="unsupported")
        return form

    def _trigger(self, begin: str) -> str:
        """The marker that a call begins with; without one, what comes before the name."""
        assert self.tools is not None
        marker = next((text for text in self.tools.special_tokens() if begin.startswith(text)), None)
        return marker or self._form(ToolFacts("\0"), "tools").begin.partition("\\u0000")[0]

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
    return tools
