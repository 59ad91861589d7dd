"""``/v1/chat/completions`` through OpenAI's client; the engine without a server says what is right."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM

MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]


def test_an_answer_is_the_engines(client: OpenAI, alone: LLM) -> None:
    (right,) = alone.chat(MESSAGES, SamplingParams(max_tokens=10))
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=10, temperature=0)
    (choice,) = answer.choices
    assert choice.message.content == right.text and choice.message.role == "assistant"
    assert choice.finish_reason == right.finish_reason and answer.object == "chat.completion"
    assert answer.usage is not None and answer.usage.prompt_tokens == right.prompt_tokens


def test_a_stream_says_the_role_first_and_then_the_same_text(client: OpenAI, alone: LLM) -> None:
    (right,) = alone.chat(MESSAGES, SamplingParams(max_tokens=10, ignore_eos=True))
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=10,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == right.text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_the_engines(client: OpenAI, alone: LLM, stream: bool) -> None:
    (right,) = alone.chat(MESSAGES, SamplingParams(max_tokens=6, logprobs=3))
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3, stream=stream
    )
    parts = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    found = [one for part in parts if part.logprobs for one in part.logprobs.content or ()]
    assert right.logprobs is not None
    assert [one.token for one in found] == [one.text for one in right.logprobs]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in right.logprobs], abs=1e-5)
    for one, other in zip(found, right.logprobs, strict=True):
        assert [top.token for top in one.top_logprobs] == [top.text for top in other.top]
        assert one.bytes is None or bytes(one.bytes).decode() == one.token


def test_template_options_reach_the_template(client: OpenAI, alone: LLM) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "well"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    (right,) = alone.chat(messages, SamplingParams(max_tokens=6), **options)
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, temperature=0, extra_body=options
    )
    assert answer.choices[0].message.content == right.text
    assert answer.usage is not None and answer.usage.prompt_tokens == right.prompt_tokens


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "no parser of tool calls"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"top_logprobs": 2}, "`top_logprobs` is given without `logprobs`"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "differ"),
        ({"stream_options": {"include_usage": True}}, "`stream_options` is given without `stream`"),
        ({"extra_body": {"top_q": 1}}, "unknown field `top_q`; did you mean 'top_p'?"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "unheard-of", "content": "x"}]}, "role"),
        ({"n": 0}, "`n`"),
        ({"max_tokens": 0}, "`max_tokens`"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client: OpenAI, given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **given})
    assert says in str(caught.value)
