"""Constrained answers over HTTP, with OpenAI's client."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from minisgl_core.llm import AsyncLLM
from support.http_server import Served, serving
from support.settings import SHARED

pytest.importorskip("llguidance")
pytest.importorskip("minisgl_grammar")

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 20, None]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TAG = {"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}


@pytest.fixture(scope="module")
def served(tiny: Callable[[str], Path]) -> Iterator[Served]:
    settings: dict[str, Any] = {**SHARED, "max_seq_len_override": 256, "backends": {"grammar": "llguidance"}}
    llm = AsyncLLM(tiny("q3-text"), backend_options={"grammar:llguidance": {"max_whitespace": 1}}, **settings)
    with serving(llm) as server:
        yield server
    llm.shutdown()


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return served.client


def chat(client: OpenAI, **given: Any) -> str:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=80, temperature=0, **given)
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


def test_a_json_schema_is_kept_to_whole_and_streamed(client: OpenAI) -> None:
    text = chat(client, response_format=NAMED)
    jsonschema.validate(json.loads(text), SCHEMA)
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=80, temperature=0, response_format=NAMED, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_structural_tags_and_plain_text(client: OpenAI) -> None:
    tags: Any = {"type": "structural_tag", "structures": [TAG], "triggers": ["<f"]}
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=40, response_format=tags)
    for begun in re.findall(r"<f.*", answer.choices[0].message.content or "", re.DOTALL):
        assert re.match(r"<f(>\s?(t|f|$)|$)", begun)
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=4, temperature=0, response_format={"type": "text"}
    )
    plain = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, temperature=0)
    assert answer.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "[0-9]{3}"}, r"[0-9]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "(" [a-c] ")"'}, r"\([a-c]\)"),
        ({"json": SCHEMA}, r"(?s)\{.*\}"),
        ({"json": json.dumps(SCHEMA)}, r"(?s)\{.*\}"),
    ],
    ids=str,
)
def test_structured_outputs_have_the_names_of_vllm(client: OpenAI, structured: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, chat(client, extra_body={"structured_outputs": structured}))
    answer = client.completions.create(
        model="tiny", prompt="x", max_tokens=80, extra_body={"structured_outputs": structured}
    )
    assert re.fullmatch(pattern, answer.choices[0].text)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "`json_schema` is missing"),
        ({"response_format": {**NAMED, "type": "json_object"}}, "`json_schema` is given"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}}, "foo"),
        ({"extra_body": {"structured_outputs": {"regex": "(ab"}}}, "unclosed group"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "exactly one"),
        ({"extra_body": {"structured_outputs": {}}}, "exactly one"),
        ({"extra_body": {"structured_outputs": {"whitespace_pattern": " "}}}, "whitespace_pattern"),
        ({"response_format": NAMED, "extra_body": {"structured_outputs": {"regex": "a"}}}, "both given"),
        ({"extra_body": {"guided_json": SCHEMA}}, "structured_outputs.json"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_used_is_refused_by_name(client: OpenAI, given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 4, **given})
    assert says in str(caught.value)


def test_hostile_grammars_leave_other_answers_as_they_are(served: Served, client: OpenAI) -> None:
    def plain() -> str:
        answer = client.completions.create(model="tiny", prompt="x y", max_tokens=30, temperature=0)
        return answer.choices[0].text

    deep: Any = {}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    hostile: list[dict[str, Any]] = [
        {"regex": "a{1,1000000}" * 50},
        {"regex": "((((a{1,100}){1,100}){1,100}){1,100})"},
        {"regex": "(a*)*b"},
        {"json": deep},
        {"json": {"$ref": "#"}},
        {"json": {"enum": [str(number) * 20 for number in range(5000)]}},
        {"grammar": "root ::= " + "(" * 20_000},
    ]

    def attack(structured: dict[str, Any]) -> int:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 3, "structured_outputs": structured}
        return int(client._client.post(f"{served.url}/v1/completions", json=body).status_code)

    alone = plain()
    with ThreadPoolExecutor(8) as pool:
        statuses = [pool.submit(attack, one) for one in hostile]
        answers = [pool.submit(plain) for _ in range(6)]
        assert {future.result() for future in answers} == {alone}
        assert {future.result() for future in statuses} <= {200, 400}
    assert served.rests()
