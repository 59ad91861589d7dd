"""Calls that a request demands, made by a model that knows nothing of tools: its grammar makes it call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from minisgl_core.llm import AsyncLLM
from minisgl_core.tokenizer import ChatTemplate
from support.http_server import serving
from support.settings import SHARED

pytest.importorskip("llguidance")
pytest.importorskip("minisgl_grammar")

TEMPLATE = (
    "{{ (tools or []) | length }} tools {% for m in messages %}{{ m.content }} {% endfor %}"
    "{% if think %}<think>{% endif %}"
)
COLORS: Any = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {"color": {"enum": ["red", "green"]}, "coats": {"enum": [1, 2]}},
            "required": ["color", "coats"],
            "additionalProperties": False,
        },
    },
}
STOP: Any = {
    "type": "function",
    "function": {"name": "stop", "parameters": {"properties": {}, "additionalProperties": False}},
}
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def asked(model: Path) -> Iterator[Callable[..., Any]]:
    """Asks a server whose parser of tool calls is ``parser``."""
    settings = {**SHARED, "max_seq_len_override": 512, "num_page_override": 2048}
    backends = {"parser": {"tools": "hermes", "reasoning": "think"}, "grammar": "llguidance"}
    llm = AsyncLLM(model, backends=backends, **settings)
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = ChatTemplate(TEMPLATE, {})
    with serving(llm) as server:

        def ask(**fields: Any) -> Any:
            body = {"model": "tiny", "messages": MESSAGES, "tools": [COLORS, STOP], "max_tokens": 200, **fields}
            return server.client.chat.completions.create(**body)

        ask.client = server.client  # type: ignore[attr-defined]
        yield ask
        assert server.rests()
    llm.shutdown()


def arguments_are_right(call: Any) -> bool:
    given = json.loads(call.function.arguments)
    if call.function.name == "stop":
        return given == {}
    return set(given) == {"color", "coats"} and given["color"] in ("red", "green") and given["coats"] in (1, 2)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_required_call_comes(asked: Callable[..., Any], temperature: float) -> None:
    (choice,) = asked(tool_choice="required", parallel_tool_calls=False, temperature=temperature, seed=3).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None and arguments_are_right(call)


@pytest.mark.parametrize("name", ["paint", "stop"])
def test_a_named_call_comes_streamed(asked: Callable[..., Any], name: str) -> None:
    named = {"type": "function", "function": {"name": name}}
    deltas = [c.choices[0] for c in asked(tool_choice=named, stream=True, temperature=0)]
    calls = [call for one in deltas for call in one.delta.tool_calls or []]
    assert calls[0].function.name == name and calls[0].id and deltas[-1].finish_reason == "tool_calls"
    text = "".join(call.function.arguments or "" for call in calls)
    assert set(json.loads(text)) == ({"color", "coats"} if name == "paint" else set())


def test_a_response_demands_calls_too(asked: Callable[..., Any]) -> None:
    client: OpenAI = asked.client  # type: ignore[attr-defined]
    tools: Any = [{"type": "function", **COLORS["function"]}]
    answer = client.responses.create(
        model="tiny", input="hi", tools=tools, tool_choice={"type": "function", "name": "paint"}, temperature=0
    )
    (call,) = answer.output
    assert call.type == "function_call" and json.loads(call.arguments)["color"] in ("red", "green")


def test_the_text_of_a_response_has_its_format(asked: Callable[..., Any]) -> None:
    client: OpenAI = asked.client  # type: ignore[attr-defined]
    form: Any = {"type": "json_schema", "name": "paint", "schema": COLORS["function"]["parameters"], "strict": True}
    answer = client.responses.create(model="tiny", input="hi", text={"format": form}, temperature=0)
    assert json.loads(answer.output_text)["color"] in ("red", "green") and answer.status == "completed"


def test_a_call_and_a_format_exclude_each_other(asked: Callable[..., Any]) -> None:
    with pytest.raises(BadRequestError, match="exclude each other"):
        asked(tool_choice="required", response_format={"type": "json_object"})


def test_strict_tools_leave_the_text_free(asked: Callable[..., Any]) -> None:
    strict = {"type": "function", "function": {**COLORS["function"], "strict": True}}
    free = asked(tool_choice="none", temperature=0, max_tokens=8, tools=[strict]).choices[0]
    bound = asked(temperature=0, max_tokens=8, tools=[strict]).choices[0]
    assert free.finish_reason == bound.finish_reason == "length" and bound.message.content


def test_a_call_cannot_interrupt_reasoning(asked: Callable[..., Any]) -> None:
    with pytest.raises(BadRequestError, match="is reasoning"):
        asked(tool_choice="required", extra_body={"chat_template_kwargs": {"think": True}})
