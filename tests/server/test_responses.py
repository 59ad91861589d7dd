"""``/v1/responses`` through OpenAI's client. The model's answers are given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from minisgl_core.llm import AsyncLLM
from minisgl_core.tokenizer import ChatTemplate
from support.http_server import Served, serving
from support.scripted import ScriptedLLM, plan_with_parsers
from support.settings import SHARED

TEMPLATE = (
    "{{ (tools or []) | length }} tools; "
    "{% for m in messages %}[{{ m.role }}{% if m.reasoning_content %} thinks {{ m.reasoning_content }}{% endif %}"
    "{% if m.content %} {{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %} calls {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}] "
    "{% endfor %}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
)
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}
TEXT = '<think>hm</think>Let me see.\n<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.fixture(scope="module")
def scripted(model: Path) -> Iterator[ScriptedLLM]:
    llm = AsyncLLM(model, **{**SHARED, "max_seq_len_override": 1024, "num_page_override": 2048})
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = ChatTemplate(TEMPLATE, {})
    yield ScriptedLLM(llm, plan_with_parsers(llm.plan, tools="hermes", reasoning="think"))
    llm.shutdown()


@pytest.fixture(scope="module")
def served(scripted: ScriptedLLM) -> Iterator[Served]:
    with serving(scripted) as server:  # type: ignore[arg-type]
        yield server


def test_a_text_is_answered(client: OpenAI, scripted: ScriptedLLM) -> None:
    scripted.says("Hello there.")
    answer = client.responses.create(model="tiny", input="hi", instructions="be brief", metadata={"a": "b"})
    assert (answer.output_text, answer.status, answer.object, answer.metadata) == (
        *("Hello there.", "completed", "response"),
        {"a": "b"},
    )
    assert answer.id.startswith("resp_") and answer.model == "tiny" and answer.usage is not None
    assert answer.usage.input_tokens == len(scripted.asked[-1].input_ids)
    assert answer.usage.input_tokens_details.cached_tokens == 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert scripted.prompt().split() == ["0", "tools;", "[system", "be", "brief]", "[user", "hi]"]


def test_items_of_the_answer(client: OpenAI, scripted: ScriptedLLM) -> None:
    scripted.says(TEXT)
    answer = client.responses.create(model="tiny", input="hi", tools=[WEATHER])
    reasoning, message, call = answer.output
    assert reasoning.type == "reasoning" and reasoning.content and reasoning.content[0].text == "hm"
    assert message.type == "message" and answer.output_text == "Let me see."
    assert call.type == "function_call" and (call.name, call.arguments) == ("get_weather", '{"city": "Rome"}')
    assert call.call_id.startswith("call_") and {item.status for item in answer.output} == {"completed"}  # type: ignore[union-attr]


def test_a_conversation_with_calls_reaches_the_template(client: OpenAI, scripted: ScriptedLLM) -> None:
    scripted.says("It rains.")
    items: list[Any] = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "rain?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "wait", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "ok"},
    ]
    assert client.responses.create(model="tiny", input=items, tools=[WEATHER]).output_text == "It rains."
    rendered = (
        '1 tools; [system be kind] [user rain?] [assistant thinks hm wait calls get_weather {"city": "Rome"} '
        "calls get_weather {}] [tool rain] [assistant so] [user ok]"
    )
    assert scripted.prompt().split() == rendered.split()


def test_events_come_in_order(client: OpenAI, scripted: ScriptedLLM) -> None:
    scripted.says(TEXT)
    events = list(client.responses.create(model="tiny", input="hi", tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for place, kind in enumerate(kinds) if kinds[place - 1 : place] != [kind]] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Let me see."
    last = events[-1]
    assert last.type == "response.completed" and last.response.usage is not None
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output and len(done) == 3


def test_the_clients_own_accumulation(client: OpenAI, scripted: ScriptedLLM) -> None:
    scripted.says("Hello there.")
    with client.responses.stream(model="tiny", input="hi") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "Hello there."


def test_events_are_named(served: Served, scripted: ScriptedLLM) -> None:
    scripted.says("Hi.")
    lines = httpx.post(f"{served.url}/v1/responses", json={"input": "x", "stream": True}).text.split("\n\n")
    for block in filter(None, lines):
        head, data = block.split("\n")
        assert head == "event: " + json.loads(data.removeprefix("data: "))["type"]


def test_a_cut_answer_is_incomplete(client: OpenAI, scripted: ScriptedLLM) -> None:
    scripted.says("Hello the", reason="length")
    answer = client.responses.create(model="tiny", input="hi", max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens" and answer.max_output_tokens == 3
    assert scripted.asked[-1].params.max_tokens == 3
    *_, last = client.responses.create(model="tiny", input="hi", max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete" and last.response.output_text == "Hello the"


def test_no_effort_means_no_thinking(client: OpenAI, scripted: ScriptedLLM) -> None:
    scripted.says("")
    answer = client.responses.create(model="tiny", input="hi", reasoning={"effort": "none"}, store=False)
    assert scripted.prompt().split()[-1] == "False"
    assert answer.output_text == "" and answer.output[0].type == "message"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"store": True}, "`store` is not supported"),
        ({"previous_response_id": "resp_1"}, "`previous_response_id` is not supported"),
        ({"background": True}, "`background` is not supported"),
        ({"conversation": "c"}, "`conversation` is not supported"),
        ({"truncation": "auto"}, "`truncation` is not supported"),
        ({"tools": [{"type": "web_search"}]}, "`tools`"),
        ({"tool_choice": "auto"}, "`tool_choice` is given without `tools`"),
        ({"reasoning": {"effort": "high"}}, "reasoning_effort"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference', which is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only parts of text"),
        ({"input": []}, "messages"),
        ({"max_output_tokens": 0}, "max_tokens"),
        ({"extra_body": {"max_tokens": 3}}, "`max_output_tokens`"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client: OpenAI, given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(**{"model": "tiny", "input": "hi", **given})
    assert says in str(caught.value)
