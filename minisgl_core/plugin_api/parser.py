"""Role ``parser``: the meaning of an answer's text: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, get_args

__all__ = [
    "PARSER_PARTS",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "CallForm",
    "Content",
    "ParseRequest",
    "Parser",
    "ParserEvent",
    "ParserPart",
    "ParserSetup",
    "Reasoning",
    "TextParser",
    "ToolFacts",
    "partial_marker",
]

ParserPart = Literal["reasoning", "tools"]
PARSER_PARTS: Final[tuple[ParserPart, ...]] = get_args(ParserPart)
"""The two parts of the role, each with a choice of its own (``Caps.ops``): the reasoning is taken off the text first,
and the tool calls out of what remains."""


@dataclass(frozen=True, slots=True)
class Content:
    """More of the text that is meant for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning that comes before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins. ``index`` counts the calls of one answer from 0; ``id``: as the text gives it, if it does."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call; together they are the text of one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of a call are complete."""

    index: int


ParserEvent = Content | Reasoning | CallBegin | CallArguments | CallEnd


@dataclass(frozen=True, slots=True)
class ToolFacts:
    """A function that the request offers. ``parameters``: the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ParserSetup:
    """What a parser is constructed with."""

    chat_template: str
    """The text of the model's template; several are joined."""


@dataclass(frozen=True, slots=True)
class ParseRequest:
    """What a parser knows of a request."""

    prompt: str = ""
    """The end of the prompt, special tokens included: a template may open the reasoning itself."""
    tools: Sequence[ToolFacts] = ()


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a call of one tool is written: ``begin``, the arguments as JSON, ``end``."""

    begin: str
    end: str


class TextParser(Protocol):
    """The state of one answer.

    The events of all pieces, joined, depend on the whole text only, not on where it was cut. A call is complete: what
    turns out to be none comes back as content, and no text is lost but markers and the white space around them.
    Nothing is raised, whatever the text.
    """

    def push(self, text: str) -> Sequence[ParserEvent]:
        """The events that are certain with one more piece of the text."""
        ...

    def finish(self) -> Sequence[ParserEvent]:
        """The events of what is still held, at the end of the text. Called once."""
        ...


class Parser(Protocol):
    """Built as ``Class(setup, options)`` in the process that talks to clients. Usable from several threads."""

    def open(self, request: ParseRequest) -> TextParser:
        """The state before the first text of an answer."""
        ...

    def special_tokens(self) -> Sequence[str]:
        """Special tokens whose text the parser has to see; answers leave out the others."""
        ...

    def call_form(self, tool: ToolFacts) -> CallForm | None:
        """How a call has to be written, so that a grammar can demand one; None if JSON is not its form, and for the
        part ``reasoning``.
        """
        ...

    def close(self) -> None: ...


def partial_marker(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of the text with which a marker begins, the whole marker excluded."""
    longest = max(map(len, markers), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(len(marker) > length and text.endswith(marker[:length]) for marker in markers):
            return length
    return 0
