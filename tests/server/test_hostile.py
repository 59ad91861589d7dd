"""Malformed, huge and hostile bodies: each is its client's error, in OpenAI's shape, and harms no other request."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM
from support.http_server import Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
LONE = "\\ud800"
"""Half a surrogate pair, which JSON can write and UTF-8 cannot"""


def text(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 2, **fields}).encode()


def chat(message: Any = "x", **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": message}], "max_tokens": 2, **fields}).encode()


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


BAD: dict[str, tuple[str, bytes]] = {
    # ---- not JSON ----
    "deep array": (COMPLETIONS, b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "deep object": (CHAT, b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "cut off": (COMPLETIONS, b'{"prompt": "x"'),
    "two values": (COMPLETIONS, b'{"prompt": "x"} {"prompt": "y"}'),
    "not utf-8": (COMPLETIONS, b'{"prompt": "\xc3\x28"}'),
    "utf-16": (COMPLETIONS, '{"prompt": "x", "n": 0}'.encode("utf-16")),
    "null bytes": (COMPLETIONS, b"\x00" * 1000),
    "NaN": (COMPLETIONS, b'{"prompt": "x", "top_p": NaN}'),
    "NaN where nothing looks": (CHAT, b'{"messages": [{"role": "user", "content": "x", "extra": NaN}]}'),
    "Infinity": (COMPLETIONS, b'{"prompt": "x", "presence_penalty": -Infinity}'),
    "overflow": (COMPLETIONS, b'{"prompt": "x", "temperature": 1e999}'),
    "number of many digits": (COMPLETIONS, b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}"),
    "duplicate key": (COMPLETIONS, b'{"prompt": "x", "max_tokens": 2, "max_tokens": 3}'),
    "duplicate key inside": (CHAT, b'{"messages": [{"role": "user", "content": "x", "content": "y"}]}'),
    # ---- wrong types and values ----
    "prompt of numbers with fractions": (COMPLETIONS, text(prompt=[1.5])),
    "prompt of booleans": (COMPLETIONS, text(prompt=[True])),
    "prompt of both": (COMPLETIONS, text(prompt=["x", 1])),
    "prompt of huge ids": (COMPLETIONS, text(prompt=[10**30])),
    "n": (COMPLETIONS, text(n=10**9)),
    "n of nothing": (COMPLETIONS, text(n=0)),
    "n beyond any number": (COMPLETIONS, text(n=10**30)),
    "max_tokens": (COMPLETIONS, text(max_tokens=2**31)),
    "negative max_tokens": (COMPLETIONS, text(max_tokens=-1)),
    "max_tokens of a fraction": (COMPLETIONS, text(max_tokens=1.5)),
    "logprobs": (COMPLETIONS, text(logprobs=10**6)),
    "top_logprobs": (CHAT, chat(logprobs=True, top_logprobs=10**6)),
    "top_k": (COMPLETIONS, text(top_k=-2)),
    "priority": (COMPLETIONS, text(priority=10**30)),
    "seed": (COMPLETIONS, text(seed=-(2**64))),
    "stop_token_ids": (COMPLETIONS, text(stop_token_ids=[2**40])),
    "logit_bias of a large number": (COMPLETIONS, text(logit_bias={"1": 1e300})),
    "logit_bias of a long id": (COMPLETIONS, text(logit_bias={"9" * 5000: 1})),
    "logit_bias of another script": (COMPLETIONS, text(logit_bias={"²": 1})),
    "template of its own": (CHAT, chat(chat_template_kwargs={"chat_template": "{% for i in range(9) %}x{% endfor %}"})),
    "template option of the engine": (CHAT, chat(chat_template_kwargs={"priority": 1})),
    "many empty stops": (COMPLETIONS, text(stop=[""] * 1000)),
    "role of a number": (CHAT, json.dumps({"messages": [{"role": 1, "content": "x"}]}).encode()),
    "no messages": (CHAT, json.dumps({"messages": []}).encode()),
    "message without role": (CHAT, json.dumps({"messages": [{"content": "x"}]}).encode()),
    "content of a number": (CHAT, chat(5)),
    "content of unknown parts": (CHAT, chat([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}])),
    "content nested": (CHAT, chat(nested(500))),
    "template option that is an argument": (CHAT, chat(chat_template_kwargs={"conversation": 1})),
    "template option that is an argument too": (CHAT, chat(chat_template_kwargs={"self": 1})),
    "tools nested": (CHAT, chat(tools=nested(500))),
    "unknown field of half a character": (COMPLETIONS, f'{{"prompt": "x", "{LONE}": 1}}'.encode()),
    "model of half a character": (COMPLETIONS, f'{{"prompt": "x", "model": "{LONE}"}}'.encode()),
    "prompt of half a character": (COMPLETIONS, f'{{"prompt": "a{LONE}b"}}'.encode()),
    "stop of half a character": (COMPLETIONS, f'{{"prompt": "x", "stop": "{LONE}"}}'.encode()),
    "message of half a character": (CHAT, f'{{"messages": [{{"role": "user", "content": "{LONE}"}}]}}'.encode()),
    "text to tokenize of half a character": ("/tokenize", f'{{"prompt": "{LONE}"}}'.encode()),
    "huge ids to detokenize": ("/detokenize", json.dumps({"tokens": [10**4000]}).encode()),
    "unknown ids to detokenize": ("/detokenize", json.dumps({"tokens": [2**31]}).encode()),
    "request to abort of half a character": ("/abort", f'{{"request_id": {{"a": "{LONE}"}}}}'.encode()),
    # ---- too much ----
    "10 MB prompt": (COMPLETIONS, text(prompt="x" * 10_000_000)),
    "10 MB message": (CHAT, chat("x" * 10_000_000)),
    "long prompt within the limit": (COMPLETIONS, text(prompt="word " * 100_000)),
    "many ids": (COMPLETIONS, text(prompt=[5] * 200_000)),
    "many prompts": (COMPLETIONS, text(prompt=[[5]] * 100_000)),
    "many choices of many prompts": (COMPLETIONS, text(prompt=["x"] * 50, n=1000)),
    "many stops": (COMPLETIONS, text(stop=["a", "b"] * 50_000)),
}


@pytest.mark.parametrize("name", BAD)
def test_each_is_an_error_of_the_client(served: Served, name: str) -> None:
    path, body = BAD[name]
    answer = httpx.post(served.url + path, content=body, headers={"content-type": "application/json"}, timeout=60)
    assert 400 <= answer.status_code < 500, answer.text[:300]
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and len(error["message"]) < 1000
    assert served.rests()


def test_answers_in_the_same_moment_are_the_solo_ones(served: Served, alone: LLM) -> None:
    prompts = [[7 + i, 8, 9] for i in range(8)]
    expected = [answer.text for answer in alone.generate(prompts, SamplingParams(max_tokens=30, ignore_eos=True))]

    def ask(prompt: list[int]) -> str:
        body = text(prompt=prompt, max_tokens=30, ignore_eos=True, temperature=0)
        headers = {"content-type": "application/json"}
        answer = httpx.post(served.url + COMPLETIONS, content=body, headers=headers, timeout=60)
        return str(answer.json()["choices"][0]["text"])

    def attack(bad: tuple[str, bytes]) -> int:
        headers = {"content-type": "application/json"}
        return httpx.post(served.url + bad[0], content=bad[1], headers=headers, timeout=60).status_code

    with ThreadPoolExecutor(6) as pool:
        attacks = [pool.submit(attack, bad) for bad in BAD.values()]
        answers = list(pool.map(ask, prompts))
        assert all(400 <= each.result() < 500 for each in attacks)
    assert answers == expected
    assert served.rests()


@pytest.mark.parametrize(
    "request_head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + b"x-long: " + b"a" * 200_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_ends_its_own_connection_alone(served: Served, request_head: bytes) -> None:
    connection = served.raw(request_head)
    try:
        assert b" 4" in connection.recv(4096)[:12]
    except ConnectionError:
        pass  # it was reset before the whole head had been read
    finally:
        connection.close()
    assert httpx.get(served.url + "/health").status_code == 200


def test_prompts_beyond_the_queue_are_refused_before_they_are_encoded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.llm, "prepare", lambda *_, **__: pytest.fail("they were encoded"))
    answer = httpx.post(served.url + COMPLETIONS, content=text(prompt=["x"] * 20_000), headers=JSON, timeout=60)
    assert answer.status_code == 429, answer.text
