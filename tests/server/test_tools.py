"""Tools and reasoning in chat completions, through OpenAI's client. The model's answers are given."""

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
from support.scripted import ScriptedLLM, plan_with_parsers
from support.settings import SHARED

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% if tools %}tools {{ tools | tojson }} {% endif %}"
    "{% for m in messages %}{{ m.role }}: {% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %} call {{ c.function.name }} {{ c.function.arguments | tojson }}"
    " {{ 'text ' + c.function.arguments }}{% endfor %} end {% endfor %}"
    "{% if add_generation_prompt %}go{% if think %} <think>{% endif %}{% endif %}"
)
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
RIGHT = [("get_weather", '{"city": "Paris"}'), ("get_time", "{}")]


@pytest.fixture(scope="module")
def scripted(model: Path) -> Iterator[Callable[..., ScriptedLLM]]:
    llm = AsyncLLM(model, **{**SHARED, "max_seq_len_override": 1024, "num_page_override": 2048})
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = ChatTemplate(TEMPLATE, {})
    yield lambda **names: ScriptedLLM(llm, plan_with_parsers(llm.plan, **names))
    llm.shutdown()


@pytest.fixture
def scripted_llm(scripted: Callable[..., ScriptedLLM]) -> ScriptedLLM:
    return scripted(tools="hermes", reasoning="think")


@pytest.fixture
def client(scripted_llm: ScriptedLLM) -> Iterator[OpenAI]:
    with serving(scripted_llm) as server:  # type: ignore[arg-type]
        yield server.client


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "tools": [WEATHER, TIME], **fields})


class Streamed:
    """The choices of a stream, put together as clients do."""

    def __init__(self, chunks: Any) -> None:
        self.chunks = list(chunks)
        self.content, self.reasoning, self.reason = "", "", None
        self.calls: list[dict[str, str]] = []
        for chunk in self.chunks:
            for choice in chunk.choices:
                self.content += choice.delta.content or ""
                self.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                self.reason = choice.finish_reason or self.reason
                for call in choice.delta.tool_calls or []:
                    if call.id:
                        assert call.index == len(self.calls) and call.type == "function" and call.function.name
                        self.calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                    self.calls[call.index]["arguments"] += call.function.arguments or ""


def test_calls_come_whole_and_as_deltas(client: OpenAI, scripted_llm: ScriptedLLM) -> None:
    scripted_llm.says("Let me see.\n" + CALLS)
    (choice,) = ask(client).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == RIGHT
    found = Streamed(ask(client, stream=True))
    assert found.content == "Let me see." and found.reason == "tool_calls"
    assert [(c["name"], c["arguments"]) for c in found.calls] == RIGHT
    assert len({c["id"] for c in found.calls}) == 2
    last = found.chunks[-1].choices[0]
    assert last.finish_reason == "tool_calls" and last.delta.content is None and last.delta.tool_calls is None


def test_an_answer_of_calls_alone_has_no_content(client: OpenAI, scripted_llm: ScriptedLLM) -> None:
    scripted_llm.says(CALLS)
    (choice,) = ask(client).choices
    assert choice.message.content is None and len(choice.message.tool_calls) == 2


def test_reasoning_comes_first_and_apart(client: OpenAI, scripted_llm: ScriptedLLM) -> None:
    scripted_llm.says("<think>\nhm, Paris\n</think>\n\nHere:\n" + CALLS)
    (choice,) = ask(client).choices
    assert choice.message.reasoning_content == choice.message.reasoning == "hm, Paris"
    assert choice.message.content == "Here:" and len(choice.message.tool_calls) == 2
    found = Streamed(ask(client, stream=True))
    assert (found.reasoning, found.content, len(found.calls)) == ("hm, Paris", "Here:", 2)


def test_a_template_may_open_the_reasoning(client: OpenAI, scripted_llm: ScriptedLLM) -> None:
    scripted_llm.says("hm\n</think>\n\nHello.")
    body = {"extra_body": {"chat_template_kwargs": {"think": True}}, "tools": []}
    message = ask(client, **body).choices[0].message
    assert (message.reasoning_content, message.content, message.tool_calls) == ("hm", "Hello.", None)
    found = Streamed(ask(client, stream=True, **body))
    assert (found.reasoning, found.content, found.reason) == ("hm", "Hello.", "stop")
    message = ask(client).choices[0].message
    assert message.content == "hm\n</think>\n\nHello." and not hasattr(message, "reasoning_content")


def test_each_choice_has_a_parser_of_its_own(client: OpenAI, scripted_llm: ScriptedLLM) -> None:
    scripted_llm.says(CALLS, "No.")
    choices = ask(client, n=2).choices
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop"]
    assert choices[1].message.content == "No." and choices[1].message.tool_calls is None
    chunks = list(ask(client, n=2, stream=True))
    ends = {c.choices[0].index: c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason}
    assert ends == {0: "tool_calls", 1: "stop"}


def test_what_is_no_call_is_content(client: OpenAI, scripted_llm: ScriptedLLM) -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city"'
    scripted_llm.says(text, reason="length")
    (choice,) = ask(client).choices
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == (text, "length", None)
    found = Streamed(ask(client, stream=True))
    assert (found.content, found.reason, found.calls) == (text, "length", [])


def test_without_tools_calls_are_not_looked_for(client: OpenAI, scripted_llm: ScriptedLLM) -> None:
    scripted_llm.says(CALLS)
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        message = ask(client, **fields).choices[0].message
        assert message.content == CALLS and message.tool_calls is None
        assert "tools" not in scripted_llm.prompt()


def test_one_call_alone_if_they_must_not_be_parallel(client: OpenAI, scripted_llm: ScriptedLLM) -> None:
    scripted_llm.says(CALLS)
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    assert len(Streamed(ask(client, parallel_tool_calls=False, stream=True)).calls) == 1
    assert len(ask(client, parallel_tool_calls=True).choices[0].message.tool_calls) == 2


def test_calls_and_results_reach_the_template(client: OpenAI, scripted_llm: ScriptedLLM) -> None:
    scripted_llm.says("It rains.")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    assert ask(client, messages=messages).choices[0].message.content == "It rains."
    text = scripted_llm.prompt()
    assert "get_weather" in text and "Rome" in text
    rendered = ChatTemplate(TEMPLATE, {}).render(messages, tools=[WEATHER])
    assert 'call get_weather {"city": "Rome"} text {"city":"Rome"} end' in rendered
    assert json.dumps([WEATHER]) in rendered and rendered.endswith("tool: rain end go")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tools": [{"type": "web_search"}]}, "`tools`"),
        ({"tools": [WEATHER, WEATHER]}, "two functions of one name"),
        ({"tools": None, "tool_choice": "auto"}, "`tool_choice` is given without `tools`"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "names 'f', which `tools` does not have"),
        ({"extra_body": {"functions": []}}, "give them as `tools`"),
    ],
)
def test_wrong_tools_are_refused_by_name(client: OpenAI, given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(client, **given)
    assert says in str(caught.value)


def test_tools_need_a_parser_and_a_template(scripted: Callable[..., ScriptedLLM]) -> None:
    without, llm = scripted(), scripted(tools="hermes")
    with serving(without) as server, pytest.raises(BadRequestError, match=r"--backend parser.tools=NAME"):  # type: ignore[arg-type]
        ask(server.client)
    llm.says("x")
    llm.tokenizer.chat_template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    with serving(llm) as server, pytest.raises(BadRequestError, match="does not read `tools`"):  # type: ignore[arg-type]
        ask(server.client)
