"""``/v1/completions`` through OpenAI's client; the engine without a server says what is right."""

from __future__ import annotations

import concurrent.futures

import pytest
from openai import OpenAI

from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM

PROMPTS = ["the cat sat", "a dog", "one two three four"]


def test_a_greedy_answer_is_the_engines(client: OpenAI, alone: LLM) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=12, temperature=0)
    (right,) = alone.generate([PROMPTS[0]], SamplingParams(max_tokens=12))
    (choice,) = answer.choices
    assert choice.text == right.text and choice.finish_reason == right.finish_reason
    assert answer.object == "text_completion" and answer.model == "tiny" and answer.usage is not None
    assert answer.usage.prompt_tokens == right.prompt_tokens
    assert answer.usage.completion_tokens == len(right.token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_seeded_batch_of_prompts_with_choices_is_the_engines(client: OpenAI, alone: LLM, stream: bool) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.9, top_p=0.9, seed=5, n=2, ignore_eos=True)
    right = [choice.text for one in alone.generate(PROMPTS, params) for choice in one.choices or ()]
    given = {"max_tokens": 9, "temperature": 0.9, "top_p": 0.9, "seed": 5, "n": 2}
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS, stream=stream, extra_body={"ignore_eos": True}, **given
    )
    texts = [""] * 6
    if stream:
        for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        texts = [choice.text for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == list(range(6))
    assert texts == right


def test_token_ids_are_prompts(client: OpenAI, alone: LLM) -> None:
    (right,) = alone.generate([[5, 6, 7]], SamplingParams(max_tokens=6))
    one = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=6, temperature=0)
    two = client.completions.create(model="tiny", prompt=[[5, 6, 7], [5, 6, 7]], max_tokens=6, temperature=0)
    assert one.choices[0].text == right.text
    assert [choice.text for choice in two.choices] == [right.text, right.text]


def test_an_echo_is_scored_as_the_engine_scores_it(client: OpenAI, alone: LLM) -> None:
    params = SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=2)
    (right,) = alone.generate([PROMPTS[2]], params)
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS[2], max_tokens=4, temperature=0, echo=True, logprobs=2
    )
    (choice,) = answer.choices
    assert choice.text == PROMPTS[2] + right.text and choice.logprobs is not None
    scored = [*(right.prompt_logprobs or ()), *(right.logprobs or ())]
    assert choice.logprobs.token_logprobs is not None and choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx([one.logprob for one in scored], abs=1e-5)
    assert choice.logprobs.tokens is not None and choice.logprobs.text_offset is not None
    assert choice.logprobs.tokens[1:] == [one.text for one in scored]
    at = 0
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert offset == at
        at += len(token)


def test_a_prompt_can_be_scored_without_an_answer(client: OpenAI, alone: LLM) -> None:
    """The request of lm-eval's ``local-completions``."""
    ids = [5, 6, 7, 8]
    (right,) = alone.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=1))
    answer = client.completions.create(model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=1, temperature=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and answer.usage is not None
    scores = [one.logprob for one in right.prompt_logprobs or ()]
    assert logprobs.token_logprobs[0] is None and logprobs.token_logprobs[1:] == pytest.approx(scores, abs=1e-5)
    assert answer.usage.completion_tokens == 0


def test_a_stream_ends_with_the_usage_that_was_requested(client: OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=PROMPTS[0],
            max_tokens=5,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_every_chunk_of_a_stream_may_have_the_usage_so_far(client: OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=[[5, 6, 7], [8, 9]],
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
            extra_body={"ignore_eos": True},
        )
    )
    used = [chunk.usage for chunk in chunks]
    assert all(one is not None and one.prompt_tokens == 5 for one in used)
    counts = [one.completion_tokens for one in used if one is not None]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-2:] == [10, 10]


def test_a_stop_string_ends_an_answer_and_is_not_part_of_it(client: OpenAI, alone: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True)
    (whole,) = alone.generate([PROMPTS[0]], params)
    stop = whole.text[4:7]
    assert stop
    answer = client.completions.create(
        model="tiny",
        prompt=PROMPTS[0],
        max_tokens=20,
        temperature=0.8,
        seed=3,
        stop=[stop],
        extra_body={"ignore_eos": True},
    )
    (choice,) = answer.choices
    assert choice.text == whole.text[: whole.text.index(stop)] and choice.finish_reason == "stop"
    assert choice.model_extra is not None and choice.model_extra["stop_reason"] == stop


def test_many_clients_get_their_solo_answers(client: OpenAI, alone: LLM) -> None:
    lengths = [1 + i % 13 for i in range(48)]
    right = [alone.generate([[5, 6, 7 + i % 5]], SamplingParams(max_tokens=n))[0].text for i, n in enumerate(lengths)]

    def ask(i: int) -> str:
        prompt = [5, 6, 7 + i % 5]
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=lengths[i], temperature=0)
        return answer.choices[0].text

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(48))) == right


def test_cached_tokens_are_in_the_usage(client: OpenAI) -> None:
    prompt = list(range(30, 60))
    client.completions.create(model="tiny", prompt=prompt, max_tokens=1, temperature=0)
    again = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, temperature=0)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == 29
