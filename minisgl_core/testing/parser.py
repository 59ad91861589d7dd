"""Checks of the role ``parser``."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal
from unittest import SkipTest

from minisgl_core.plugin_api import (
    CallArguments,
    CallBegin,
    CallEnd,
    Caps,
    Content,
    Parser,
    ParseRequest,
    ParserEvent,
    ParserSetup,
    Reasoning,
    ToolFacts,
)
from minisgl_core.registry.query import Requirement

from .check import Check, Result, caps_of
from .collect import collect
from .compare import expect

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest
    from .device_fixture import DeviceFixture

__all__ = ["ParserCheck", "joined", "parse", "parser_checks"]

TOOLS: Final = (
    ToolFacts("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}}),
    ToolFacts("add-2", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}),
)
PROMPTS: Final = ("", "<|assistant|>", "<|assistant|>\n<think>\n")
ARGUMENTS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"city": "Paris"},
    {"city": 'a "quoted" \\ {[ }] \n name', "more": {"deep": [1, {"x": None}], "y": -1.5e-7}},
    {"city": "Zürich, 東京 \U0001f600", "text": "</tool_call> <tool_call> ```</think><think>"},
)
WORDS: Final = (
    *("Hello", " ", "\n", "  \n\t", "<", "</", "{", "}", '{"name": ', '"get_weather"', ', "arguments": ', ";", "```"),
    *(
        '"parameters": {}}',
        "[1, 2]",
        "\\",
        '"',
        "é東",
        "\U0001f600",
        "<think>",
        "</think>",
        "no call at all",
        "<|",
        "｜>",
    ),
)
TEXTS: Final = 60
"""Random texts of a check."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ParserCheck(Check):
    """``plain``: text without markers stays as it is. ``cuts``: pieces and the whole have the same events. ``calls``:
    calls in the parser's own form. ``broken``: incomplete and wrong calls. ``many``: answers in turn.
    """

    scenario: Literal["plain", "cuts", "calls", "broken", "many"]
    part: str = "tools"
    seed: int = 0

    def requirement(self, fixture: DeviceFixture) -> Requirement:
        return Requirement(op=self.part)

    def run(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> Result:
        parser: Parser = under_test.build(ParserSetup(""), caps_of(under_test, self, fixture))
        getattr(self, f"_{self.scenario}")(parser)
        parser.close()
        return Result()

    def _plain(self, parser: Parser) -> None:
        for text in ("", "Hello.", " a\n\n b \n", "x < y </b> \U0001f600 <", "1. {not json}", "é" * 500):
            for cuts in ((), range(1, len(text))):
                _same(parse(parser, ParseRequest("", TOOLS), text, cuts), [Content(text)] if text else [], text)

    def _cuts(self, parser: Parser) -> None:
        for number, text in enumerate(self._texts(parser)):
            request = ParseRequest(PROMPTS[number % len(PROMPTS)], TOOLS)
            whole = parse(parser, request, text)
            _check_order(whole, text)
            places = [(place,) for place in range(1, len(text))]
            for cuts in (range(1, len(text)), range(2, len(text), 3), *places[:: max(1, len(places) // 12)]):
                _same(parse(parser, request, text, cuts), whole, text)

    def _texts(self, parser: Parser) -> Iterator[str]:
        """Markers, pieces of JSON, words and white space in random order; whole calls among them."""
        draw = random.Random(self.seed)
        own = [*parser.special_tokens(), *_calls(parser)]
        own += [text[: draw.randrange(len(text))] for text in own if text]
        for _ in range(TEXTS):
            yield "".join(draw.choice(own if own and draw.random() < 0.4 else WORDS) for _ in range(draw.randrange(14)))

    def _calls(self, parser: Parser) -> None:
        if not _calls(parser):
            raise SkipTest("its calls are no JSON")
        for tool in TOOLS:
            for arguments in ARGUMENTS:
                text = _written(parser, tool, arguments)
                _check_call(parse(parser, ParseRequest("", TOOLS), text), tool.name, arguments, text)
                _check_call(
                    parse(parser, ParseRequest("", TOOLS), text, range(1, len(text))), tool.name, arguments, text
                )

    def _broken(self, parser: Parser) -> None:
        for text in _calls(parser):
            for end in range(len(text)):
                events = parse(parser, ParseRequest("", TOOLS), text[:end])
                _check_order(events, text[:end])
                if not any(isinstance(event, CallBegin) for event in events):
                    _keeps_all(events, text[:end])
        for word in WORDS:
            _keeps_all(parse(parser, ParseRequest("", TOOLS), f"a{word}z"), f"a{word}z")

    def _many(self, parser: Parser) -> None:
        """Two answers whose pieces alternate."""
        texts = list(self._texts(parser))
        for one, other in zip(texts[::2], texts[1::2], strict=False):
            request = ParseRequest("", TOOLS)
            states = (parser.open(request), parser.open(request))
            found: tuple[list[ParserEvent], list[ParserEvent]] = ([], [])
            for place in range(max(len(one), len(other))):
                for state, events, text in zip(states, found, (one, other), strict=True):
                    events.extend(state.push(text[place : place + 1]))
            for state, events, text in zip(states, found, (one, other), strict=True):
                events.extend(state.finish())
                _same(joined(events), parse(parser, request, text), text)


def parse(parser: Parser, request: ParseRequest, text: str, cuts: Iterable[int] = ()) -> list[ParserEvent]:
    """The joined events of a text that comes in pieces."""
    events: list[ParserEvent] = []
    state, at = parser.open(request), 0
    for place in (*cuts, len(text)):
        events += state.push(text[at:place])
        at = place
    return joined([*events, *state.finish()])


def joined(events: Sequence[ParserEvent]) -> list[ParserEvent]:
    """Adjacent pieces of one thing as one event."""
    found: list[ParserEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content | Reasoning | CallArguments):
            if type(last) is type(event) and getattr(last, "index", None) == getattr(event, "index", None):
                found[-1] = replace(event, text=getattr(last, "text", "") + event.text)
                continue
            if not event.text and not isinstance(event, CallArguments):
                continue
        found.append(event)
    return found


def _same(found: list[ParserEvent], wanted: list[ParserEvent], text: str) -> None:
    expect(found == wanted, f"{text!r:.200} becomes {found!r:.300}, expected {wanted!r:.300}")


def _check_order(events: Sequence[ParserEvent], text: str) -> None:
    """Calls are numbered from 0, begin and end in turn, and have a JSON object each."""
    at = 0
    calls = [event for event in events if not isinstance(event, Content | Reasoning)]
    for begin, arguments, end in zip(calls[::3], calls[1::3], calls[2::3], strict=False):
        right = isinstance(begin, CallBegin) and isinstance(arguments, CallArguments) and isinstance(end, CallEnd)
        expect(right and begin.index == arguments.index == end.index == at, f"{text!r:.200} has the events {events!r}")
        assert isinstance(begin, CallBegin) and isinstance(arguments, CallArguments)
        expect(bool(begin.name), f"a call in {text!r:.200} has no name")
        expect(_is_object(arguments.text), f"a call in {text!r:.200} has the arguments {arguments.text!r:.200}")
        at += 1
    expect(len(calls) == 3 * at, f"{text!r:.200} has the events {events!r:.300}")
    reasoning = [place for place, event in enumerate(events) if isinstance(event, Reasoning)]
    expect(reasoning in ([], [0]), f"the reasoning of {text!r:.200} does not come first: {events!r:.300}")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _check_call(events: Sequence[ParserEvent], name: str, arguments: dict[str, Any], text: str) -> None:
    _check_order(events, text)
    expect(len(events) == 3, f"the call {text!r:.200} becomes {events!r:.300}")
    begin, given = events[0], events[1]
    assert isinstance(begin, CallBegin) and isinstance(given, CallArguments)
    expect(begin.name == name, f"the call of {name} in {text!r:.200} is one of {begin.name}")
    expect(json.loads(given.text) == arguments, f"the arguments of {text!r:.200} become {given.text!r:.200}")


def _keeps_all(events: Sequence[ParserEvent], text: str) -> None:
    shown = "".join(event.text for event in events if isinstance(event, Content | Reasoning))
    lost = not any(isinstance(event, Reasoning) for event in events) and shown.split() != text.split()
    expect(not lost, f"{text!r:.200} has no call, and becomes {shown!r:.200}")


def _calls(parser: Parser) -> list[str]:
    """Calls in the parser's form; none if it does not give one."""
    found = [_written(parser, tool, arguments) for tool in TOOLS for arguments in ARGUMENTS]
    return [text for text in found if text]


def _written(parser: Parser, tool: ToolFacts, arguments: dict[str, Any]) -> str:
    form = parser.call_form(tool)
    return "" if form is None else form.begin + json.dumps(arguments, ensure_ascii=False) + form.end


def parser_checks(under_test: BackendUnderTest, fixture: DeviceFixture, quick: bool) -> list[Check]:
    """Each scenario for each part that a capability set names."""
    return collect(under_test, fixture, lambda caps: _of_caps(caps, quick), lambda caps: ())


def _of_caps(caps: Caps, quick: bool) -> Iterator[ParserCheck]:
    for part in caps.ops:
        yield ParserCheck(name=f"{part}/plain", scenario="plain", part=part)
        for seed in range(2 if quick else 8):
            yield ParserCheck(name=f"{part}/cuts,{seed}", scenario="cuts", part=part, seed=seed)
        if part == "tools":
            yield ParserCheck(name=f"{part}/calls", scenario="calls", part=part)
        yield ParserCheck(name=f"{part}/broken", scenario="broken", part=part)
        yield ParserCheck(name=f"{part}/many", scenario="many", part=part)
