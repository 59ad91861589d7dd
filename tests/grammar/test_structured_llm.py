"""Answers under grammars, with the real library, in whole engines: valid, whatever the model prefers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from minisgl_core.core import SamplingParams
from minisgl_core.env import ENV
from minisgl_core.errors import AdmissionError
from minisgl_core.llm import LLM, AsyncLLM
from minisgl_core.plugin_api import Grammar
from support.settings import SHARED

pytest.importorskip("llguidance")
pytest.importorskip("minisgl_grammar")

SETTINGS: dict[str, Any] = {
    **SHARED,
    "max_seq_len_override": 256,
    "backends": {"grammar": "llguidance"},
    "backend_options": {"grammar:llguidance": {"max_whitespace": 1}},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "s": {"type": "string", "maxLength": 4},
    },
    "required": ["ok", "n", "s"],
    "additionalProperties": False,
}
JSON = Grammar.json_schema(SCHEMA)
TAG = {"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}
PROMPTS = ["one", "two and", "three"]


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Path]) -> Path:
    return tiny("q3-text")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, **SETTINGS) as found:
        yield found


def test_answers_are_valid_and_other_rows_are_what_they_are_alone(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=20)
    alone = [llm.generate(prompt, plain)[0].token_ids for prompt in PROMPTS]
    forms = [SamplingParams(max_tokens=200, temperature=t, seed=7, grammar=JSON) for t in (0.0, 1.0, 5.0)]
    answers = llm.generate([*PROMPTS, *PROMPTS], [*forms, plain, plain, plain])
    for answer in answers[:3]:
        assert answer.finish_reason == "stop"
        check(answer.text)
    assert [answer.token_ids for answer in answers[3:]] == alone
    assert llm.generate(PROMPTS, forms)[1].text == answers[1].text, "a seed means the same answer"


@pytest.mark.parametrize(("tp_size", "overlap", "pages"), [(1, False, 512), (1, True, 60), (2, True, 512)])
def test_answers_are_the_same_without_overlap_after_preemption_and_on_two_ranks(
    llm: LLM, model: Path, tp_size: int, overlap: bool, pages: int
) -> None:
    params = SamplingParams(max_tokens=100, grammar=JSON)
    right = [answer.text for answer in llm.generate(PROMPTS, params)]
    ENV.DISABLE_OVERLAP_SCHEDULING.value = not overlap
    try:
        settings = {**SETTINGS, "num_page_override": pages, "page_size": 1, "tp_size": tp_size}
        if pages < 100:
            settings["max_seq_len_override"] = pages
        with LLM(model, **settings) as other:
            answers = other.generate(PROMPTS, params)
            found = [answer.text for answer in answers]
            preemptions = other.scheduler.stats.preemptions
    finally:
        ENV.DISABLE_OVERLAP_SCHEDULING.reset()
    if pages < 100:
        assert preemptions and [text for text, one in zip(right, found, strict=True) if not text.startswith(one)] == []
    else:
        assert found == right


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar.regex("[a-c]{2,5}!"), r"[a-c]{2,5}!"),
        (Grammar.choice(["yes", "no", "é日本"]), "yes|no|é日本"),
        (Grammar.ebnf('root ::= "<" [0-9] [0-9]? ">"'), r"<[0-9]{1,2}>"),
        (Grammar.structural_tag([TAG], ["<f"], at_least_one=True, stop_after_first=True), r"<f>\s*(true|false)\s*</f>"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_other_kinds_of_grammar(llm: LLM, grammar: Grammar, pattern: str) -> None:
    params = SamplingParams(max_tokens=60, temperature=2.0, seed=1, grammar=grammar, n=3)
    (answer,) = llm.generate("x", params)
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and re.fullmatch(pattern, choice.text), choice.text


def test_max_tokens_stop_and_stop_token_ids_cut_an_answer(llm: LLM) -> None:
    (whole,) = llm.generate("x", SamplingParams(max_tokens=60, grammar={"regex": "ab{30}c"}))
    assert whole.text == "a" + "b" * 30 + "c" and whole.finish_reason == "stop" and whole.stop_reason is None
    (cut,) = llm.generate("x", SamplingParams(max_tokens=2, grammar={"regex": "ab{30}c"}))
    assert cut.finish_reason == "length" and whole.token_ids[:2] == cut.token_ids
    (stopped,) = llm.generate("x", SamplingParams(max_tokens=60, grammar={"regex": "ab{30}c"}, stop="bbb"))
    assert stopped.finish_reason == "stop" and stopped.text == "a"
    ended = SamplingParams(max_tokens=60, grammar={"regex": "ab{30}c"}, stop_token_ids=[whole.token_ids[0]])
    assert llm.generate("x", ended)[0].stop_reason == whole.token_ids[0]


@pytest.mark.parametrize("given", [{"ignore_eos": True}, {"min_tokens": 40}], ids=str)
def test_the_end_is_forbidden_while_the_grammar_can_go_on_and_no_longer(llm: LLM, given: dict[str, Any]) -> None:
    # logit_bias makes the end token by far the likeliest wherever it is allowed
    (end,) = sorted(llm.engine.eos_token_ids | set(llm.tokenizer.eos_token_ids if llm.tokenizer else ()))[:1]
    params = {"max_tokens": 60, "logit_bias": {end: 100.0}, "grammar": {"regex": "[ab]{1,7}"}}
    (short,) = llm.generate("x", SamplingParams(**params))
    (long,) = llm.generate("x", SamplingParams(**params, **given))
    assert len(short.text) < 7 and len(long.text) == 7 and short.finish_reason == long.finish_reason == "stop"


def test_log_probabilities_are_those_of_the_tokens_that_were_allowed(llm: LLM) -> None:
    (answer,) = llm.generate("x", SamplingParams(max_tokens=20, grammar={"choice": ["yes"]}, logprobs=2))
    assert answer.text == "yes" and answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ({"regex": "(ab"}, "unclosed group"),
        ({"ebnf": "root ::= x"}, "Rule 'x' not found"),
        ({"json_schema": {"type": "foo"}}, "Invalid type: foo"),
        ({"json_schema": {"$ref": "#"}}, "the grammar cannot be used"),
        ({"regex": "x" * 2_000_000}, "at most 1048576"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_grammar_is_refused_before_any_work(llm: LLM, grammar: dict[str, Any], says: str) -> None:
    with pytest.raises(AdmissionError, match=re.escape(says)):
        llm.generate(["x", "y"], SamplingParams(grammar=grammar))
    assert llm.generate("x", SamplingParams(max_tokens=2))[0].finish_reason == "length"


def test_without_a_backend_a_grammar_is_refused_with_the_install_command(model: Path) -> None:
    with (
        LLM(model, **{**SETTINGS, "backends": {"grammar": "none"}}) as bare,
        pytest.raises(AdmissionError, match=r"pip install 'minisgl-grammar\[llguidance\]'"),
    ):
        bare.generate("x", SamplingParams(grammar=JSON))


def test_coroutines_and_streams_have_grammars_too(model: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(model, **SETTINGS) as llm:
            params = SamplingParams(max_tokens=100, grammar=JSON)
            answers = await llm.generate(PROMPTS, params)
            for answer in answers:
                check(answer.text)
            text = "".join([chunk.text async for chunk in llm.stream(PROMPTS[0], params)])
            assert text == answers[0].text
            llm.stream("dropped unread", params)
            with pytest.raises(AdmissionError, match="unclosed group"):
                await anext(llm.stream("x", SamplingParams(grammar={"regex": "(ab"})))

    asyncio.run(run())
