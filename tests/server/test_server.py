"""What is not generation: errors, keys, limits, health, metrics, clients that go away."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai import APIStatusError, AuthenticationError, NotFoundError, OpenAI, RateLimitError

from minisgl_core.llm import AsyncLLM
from support.http_server import Served, serving
from support.settings import SHARED

LONG = {"prompt": [5, 6, 7], "max_tokens": 50, "ignore_eos": True}


def post(served: Served, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(served.url + path, content=content, headers={"content-type": "application/json", **headers})


def request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_fields_that_routers_add_change_nothing(served: Served, path: str) -> None:
    """The fields are those that vllm-router 0.1.17 adds to each body."""
    text = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    body = {**text, "max_tokens": 4, "temperature": 0}
    added = {
        "stream": False,
        "no_stop_trim": False,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "return_hidden_states": False,
        "include_reasoning": True,
        "best_of": 1,
        "suffix": None,
    }
    plain, routed = (post(served, path, each) for each in (body, {**body, **added}))
    assert plain.status_code == 200
    assert routed.status_code == 200, routed.text
    assert plain.json()["choices"] == routed.json()["choices"]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"nope", 400, "the body is not JSON"),
        (b"", 400, "the body is empty"),
        (b'{"prompt": "\xff"}', 400, ""),
        (b"[" * 100_000, 400, ""),
        (b"[]", 400, "no JSON object"),
        ({}, 400, "`prompt` is missing"),
        ({"prompt": {"a": 1}}, 400, "`prompt`: give a text, a list of token ids, or a list of these"),
        ({"prompt": []}, 400, "`prompt` is an empty list"),
        ({"prompt": [[]]}, 400, "the prompt is empty"),
        ({"prompt": ["good", ""]}, 400, "prompt 1: the prompt is empty"),
        ({"prompt": [999_999]}, 400, "token id 999999"),
        ({"prompt": "x", "temperature": "1"}, 400, "`temperature`"),
        (b'{"prompt": "x", "temperature": NaN}', 400, "NaN is no number"),
        ({"prompt": "x", "seed": 2**70}, 400, "`seed`"),
        ({"prompt": "x", "stop": [1]}, 400, "`stop`: give a text or a list of texts"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, 400, "`logit_bias`"),
        ({"prompt": "x", "best_of": 2}, 400, "`best_of` is not supported"),
        ({"prompt": "x", "best_of": True}, 400, "`best_of` is not supported"),
        ({"prompt": "x", "skip_special_tokens": False}, 400, "`skip_special_tokens` can only be true here"),
        ({"prompt": "x", "service_tier": "flex"}, 400, '`service_tier` can only be "auto" or "default" here'),
        ({"prompt": "x", "stream": True, "echo": True}, 400, "`echo` is given with `stream`"),
        ({"prompt": "x", "model": "other"}, 404, "the model 'other' is not served here"),
        ({"prompt": [5] * 65, "max_tokens": 1}, 400, "the context is 64 tokens"),
        ({"prompt": "x" * (1 << 21)}, 413, "the body is larger than"),
    ],
)
def test_a_bad_body_is_refused_in_openais_shape(served: Served, body: Any, status: int, says: str) -> None:
    answer = post(served, "/v1/completions", body)
    error = answer.json()["error"]
    assert answer.status_code == status and says in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert served.rests()


def test_a_prompt_that_is_too_long_has_openais_code(served: Served) -> None:
    error = post(served, "/v1/completions", {"prompt": [5] * 65}).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"


def test_chunked_bodies_are_limited_too(served: Served) -> None:
    answer = httpx.post(
        f"{served.url}/v1/completions",
        content=(b" " * 4096 for _ in range(1000)),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 413


def test_unknown_paths_and_methods(served: Served) -> None:
    for answer in (httpx.get(f"{served.url}/v1/nothing"), httpx.get(f"{served.url}/v1/completions")):
        assert answer.status_code in (404, 405) and "is not served here" in answer.json()["error"]["message"]


def test_request_ids_go_in_and_out(served: Served) -> None:
    answer = post(served, "/v1/completions", {"prompt": "x", "max_tokens": 1}, **{"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine" and answer.json()["id"] == "cmpl-mine"
    assert post(served, "/v1/completions", {"prompt": "x", "max_tokens": 1}).headers["x-request-id"]
    assert post(served, "/v1/completions", {}, **{"x-request-id": "x" * 200}).status_code == 400


def test_models(served: Served, client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.model_extra is not None and model.model_extra["max_model_len"] == 64
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(NotFoundError):
        client.models.retrieve("other")


def test_tokens_go_both_ways(served: Served) -> None:
    text = "the cat sat"
    assert served.llm.tokenizer is not None
    ids = post(served, "/tokenize", {"prompt": text}).json()
    assert ids["tokens"] == served.llm.tokenizer.encode(text) and ids["count"] == len(ids["tokens"])
    assert post(served, "/detokenize", {"tokens": ids["tokens"]}).json()["prompt"] == text
    messages = [{"role": "user", "content": "hi"}]
    chat = post(served, "/tokenize", {"messages": messages}).json()["tokens"]
    assert chat == served.llm.tokenizer.apply_chat_template(messages)
    assert "give `prompt` or `messages`" in post(served, "/tokenize", {}).text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_frees_its_pages(served: Served, stream: bool, n: int) -> None:
    connection = served.raw(request({**LONG, "stream": stream, "n": n}), read=200 if stream else 0)
    end = time.monotonic() + 10
    while not served.state.running and not stream and time.monotonic() < end:
        time.sleep(0.001)
    connection.close()
    assert served.rests(within_s=5)


def test_a_request_is_aborted_by_its_id(served: Served, slow_steps: Callable[[], None]) -> None:
    slow_steps()
    found: list[httpx.Response] = []
    ask = threading.Thread(
        target=lambda: found.append(post(served, "/v1/completions", LONG, **{"x-request-id": "abc"}))
    )
    ask.start()
    end = time.monotonic() + 10
    while "abc" not in served.state.running and time.monotonic() < end:
        time.sleep(0.005)
    assert post(served, "/abort", {"request_id": "abc"}).json() == {"aborted": True}
    ask.join(20)
    assert found[0].status_code == 499 and "aborted" in found[0].text
    assert post(served, "/abort", {"request_id": "abc"}).json() == {"aborted": False}
    assert served.rests()


def test_a_stream_is_aborted_by_its_id(served: Served, slow_steps: Callable[[], None]) -> None:
    slow_steps()
    body = {**LONG, "stream": True}
    headers = {"x-request-id": "stream"}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, headers=headers, timeout=30) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        assert json.loads(next(lines))["choices"]
        assert post(served, "/abort", {"request_id": "stream"}).json() == {"aborted": True}
        *_, error, done = lines
    assert json.loads(error)["error"]["code"] == "aborted" and done == "[DONE]"
    assert served.rests()


@pytest.fixture
def slow_steps(served: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Steps take a tenth of a second from then on."""

    def slow() -> None:
        step = served.llm.scheduler.step

        def slowly() -> Any:
            time.sleep(0.1)
            return step()

        monkeypatch.setattr(served.llm.scheduler, "step", slowly)

    return slow


def test_too_many_requests_get_a_time_to_retry(
    served: Served, async_llm: AsyncLLM, slow_steps: Callable[[], None]
) -> None:
    slow_steps()
    with serving(async_llm, max_waiting=0) as narrow:
        connections = [narrow.raw(request({**LONG, "stream": True}), read=200) for _ in range(8)]
        with pytest.raises(RateLimitError) as caught:
            narrow.client.completions.create(model="tiny", prompt="x")
        with pytest.raises(RateLimitError):
            narrow.client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], stream=True
            )
        assert caught.value.response.headers["retry-after"] == "1" and "8 requests run and wait" in str(caught.value)
        for connection in connections:
            connection.close()
        assert narrow.rests()
        assert narrow.client.completions.create(model="tiny", prompt="x", max_tokens=1).choices


def test_a_token_that_cannot_come_has_a_finite_logprob(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=[5, 6, 7], max_tokens=2, logprobs=3, logit_bias={"9": -1e6}, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert all(value is not None and value >= -9999 for value in logprobs.token_logprobs)


def test_a_key_is_needed_where_one_is_set(async_llm: AsyncLLM) -> None:
    with serving(async_llm, api_key="secret") as locked:
        assert locked.client.models.list().data
        with (
            OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as stranger,
            pytest.raises(AuthenticationError),
        ):
            stranger.models.list()
        assert httpx.get(f"{locked.url}/v1/models").status_code == 401
        assert httpx.get(f"{locked.url}/health").status_code == 200


def test_pages_of_other_origins_are_refused_unless_named(served: Served, async_llm: AsyncLLM) -> None:
    origin = {"origin": "https://a.example"}
    assert "access-control-allow-origin" not in httpx.get(f"{served.url}/v1/models", headers=origin).headers
    with serving(async_llm, cors_origins=("https://a.example",)) as open_to_one:
        answer = httpx.get(f"{open_to_one.url}/v1/models", headers=origin)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"


def test_while_the_model_is_loaded_the_server_says_so() -> None:
    with serving(None) as loading:
        assert httpx.get(f"{loading.url}/ready").status_code == httpx.get(f"{loading.url}/health").status_code == 503
        with pytest.raises(APIStatusError) as caught:
            loading.client.completions.create(model="tiny", prompt="x")
        assert caught.value.status_code == 503 and "being loaded" in str(caught.value)


def test_health_asks_the_engine(served: Served) -> None:
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{served.url}/ready").json() == {"status": "ready"}


def test_a_dead_engine_is_not_healthy(model: Any) -> None:
    llm = AsyncLLM(model, **SHARED)
    with serving(llm) as server:
        llm.shutdown()
        assert httpx.get(f"{server.url}/health").status_code == 503
        with pytest.raises(APIStatusError) as caught:
            server.client.completions.create(model="tiny", prompt="x")
        assert caught.value.status_code == 503


def test_server_info_shows_the_plan(served: Served) -> None:
    info = httpx.get(f"{served.url}/server_info").json()
    assert info["plan"] == json.loads(json.dumps(served.llm.plan.to_json()))
    assert info["config"]["max_running_req"] == 8 and info["versions"]["minisgl-core"]
