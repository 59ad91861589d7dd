"""Properties of the built-in parsers, alone and in a row, and answers as models write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.builtin.parsers.formats import DeepSeekParser, HermesParser, Llama3Parser, Qwen3CoderParser
from minisgl_core.builtin.parsers.think import ThinkParser
from minisgl_core.plugin_api import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    ParseRequest,
    ParserEvent,
    ParserSetup,
    Reasoning,
    ToolFacts,
)
from minisgl_core.server.parsing import AnswerParser
from minisgl_core.testing.parser import joined, parse

TOOLS = [
    ToolFacts("f", {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "any": {}}}),
    ToolFacts("get_time"),
]
FORMS: dict[str, Any] = {
    "hermes": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "llama3": Llama3Parser,
    "deepseek": DeepSeekParser,
    "think": ThinkParser,
}
CALLS, CALL, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
END, ENDS = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
PIECES = [
    *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"n": 1}}', '{"name": "f", "parameters": {}}'),
    *("<function=f>", "</function>", "<parameter=n>", "</parameter>", "<|python_tag|>", ";", "<think>", "</think>"),
    *(CALLS, CALL, SEP, END, ENDS, "function", "\n```json\n", "```", "{", "}", '"', "\\", "\n", " ", "text"),
]
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=12).map("".join)


def built(name: str) -> Any:
    return FORMS[name](ParserSetup(""), None)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, data=st.data())
def test_pieces_have_the_events_of_the_whole(name: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    request = ParseRequest(data.draw(st.sampled_from(["", "<think>\n"])), TOOLS)
    assert parse(built(name), request, text, cuts) == parse(built(name), request, text)


def row(*names: str, text: str, cuts: list[int], prompt: str = "") -> list[ParserEvent]:
    request = ParseRequest(prompt, TOOLS)
    parser = AnswerParser([built(name).open(request) for name in names])
    events: list[ParserEvent] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        events += parser.push(text[start:end])
    return joined([*events, *parser.finish()])


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, data=st.data(), form=st.sampled_from(["hermes", "llama3", "deepseek", "qwen3_coder"]))
def test_reasoning_and_calls_compose(text: str, data: st.DataObject, form: str) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert row("think", form, text=text, cuts=cuts) == row("think", form, text=text, cuts=[])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("name", ["hermes", "llama3", "deepseek"])
@settings(max_examples=40, deadline=None)
@given(arguments=st.dictionaries(st.text(), JSON, max_size=3), before=st.sampled_from(["", "Well.\n"]))
def test_arguments_come_back(name: str, arguments: dict[str, Any], before: str) -> None:
    parser = built(name)
    form = parser.call_form(TOOLS[0])
    before = "" if name == "llama3" else before
    text = before + form.begin + json.dumps(arguments, ensure_ascii=False) + form.end
    events = parse(parser, ParseRequest("", TOOLS), text, range(1, len(text)))
    assert events[-3] == CallBegin(0, "f") and events[-1] == CallEnd(0)
    assert isinstance(events[-2], CallArguments) and json.loads(events[-2].text) == arguments
    assert events[:-3] == ([Content(before.strip())] if before else [])


def call(index: int, name: str, arguments: str) -> list[ParserEvent]:
    return [CallBegin(index, name), CallArguments(index, arguments), CallEnd(index)]


SAMPLES: list[tuple[str, str, list[ParserEvent]]] = [
    (
        "hermes",
        (
            'I look.\n<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>\n<tool_call>\n'
            '{"name": "get_time", "arguments": {}}\n</tool_call>'
        ),
        [Content("I look."), *call(0, "f", '{"n": 1}'), *call(1, "get_time", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', call(0, "f", '{"n": 1}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": NaN}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1e999}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 20000 + "1" + "}" * 20001 + "</tool_call>", []),
    (
        "llama3",
        '{"name": "f", "parameters": {"n": 1}}; {"name": "get_time", "parameters": {}}',
        [*call(0, "f", '{"n": 1}'), *call(1, "get_time", "{}")],
    ),
    ("llama3", '<|python_tag|>{"name": "other", "parameters": {"n": 1}}', call(0, "other", '{"n": 1}')),
    ("llama3", '{"name": "Ann", "parameters": {"n": 1}}', []),
    ("llama3", '<|python_tag|>brave_search.call(query="x")', []),
    (
        "deepseek",
        (
            f'Yes.{CALLS}{CALL}function{SEP}f\n```json\n{{"n": 1}}\n```{END}\n'
            f"{CALL}function{SEP}get_time\n```json\n{{}}\n```{END}{ENDS}"
        ),
        [Content("Yes."), *call(0, "f", '{"n": 1}'), *call(1, "get_time", "{}")],
    ),
    ("deepseek", f'{CALLS}{CALL}f{SEP}{{"n": 1}}{END}{ENDS}', call(0, "f", '{"n": 1}')),
    (
        "qwen3_coder",
        (
            "Now.\n<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=s>\n4\n  <b>\n</parameter>\n"
            "<parameter=any>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
        ),
        [Content("Now."), *call(0, "f", '{"n": 3, "s": "4\\n  <b>", "any": [1, 2]}')],
    ),
    ("qwen3_coder", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>", call(0, "get_time", "{}")),
    ("qwen3_coder", "<tool_call>\n<function=f>\nn = 3\n</function>\n</tool_call>", []),
    ("think", "<think>\nhm\n</think>\n\nYes.\n", [Reasoning("hm"), Content("Yes.\n")]),
    ("think", "<think>\n\n</think>\n\nYes.", [Content("Yes.")]),
    ("think", "<think>only hm", [Reasoning("only hm")]),
]


@pytest.mark.parametrize(("name", "text", "right"), SAMPLES)
def test_answers_as_models_write_them(name: str, text: str, right: list[ParserEvent]) -> None:
    """What is no call comes back as it is."""
    right = right or [Content(text)]
    assert parse(built(name), ParseRequest("", TOOLS), text) == right
    assert parse(built(name), ParseRequest("", TOOLS), text, range(7, len(text), 7)) == right


def test_a_template_that_opens_the_reasoning() -> None:
    text = 'hm\n</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert row("think", "hermes", text=text, cuts=[], prompt="<|a|>\n<think>\n") == [
        Reasoning("hm"),
        *call(0, "f", "{}"),
    ]


@pytest.mark.parametrize("name", FORMS)
def test_hostile_texts_cost_little(name: str) -> None:
    """Ten thousand beginnings of calls, none of which ends: seconds, not minutes, and all of it is content."""
    markers = [*built(name).special_tokens(), "{", f"{CALL}f{SEP}{{"]
    for marker in markers:
        text = "x" + (marker + " ") * 10_000
        events = parse(built(name), ParseRequest("", TOOLS), text, range(50, len(text), 50))
        assert "".join(event.text for event in events if isinstance(event, Content)) == text
