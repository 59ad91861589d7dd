"""Section F in a whole engine: which ids and strings end an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM
from support.driver import greedy
from support.edited_checkpoints import edited

SETTINGS: dict[str, Any] = {
    "dtype": torch.float32,
    "page_size": 1,
    "num_page_override": 256,
    "max_seq_len_override": 64,
    "max_running_req": 4,
    "progress": False,
}


@pytest.mark.parametrize("token", [2, 7, 9])
def test_case_47_every_eos_id_ends_an_answer(token: int, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """generation_config.json says [2, 7], config.json says 9: the union counts. The model is made to emit one of them
    at every step.
    """
    folder = edited(
        tiny("q3-text"), tmp_path / "model", config={"eos_token_id": 9}, generation={"eos_token_id": [2, 7]}
    )
    only: dict[str, Any] = {"max_tokens": 4, "logit_bias": {token: 1e5}}
    with LLM(folder, **SETTINGS) as llm:
        params = [
            SamplingParams(**only),
            SamplingParams(**only, ignore_eos=True),
            SamplingParams(**only, ignore_eos=True, stop_token_ids=[token]),
            SamplingParams(**only, ignore_eos=True, stop_token_ids=[500]),
        ]
        answers = llm.generate([[20, 21, 22]] * 4, params, progress=False)
    assert [(answer["token_ids"], answer["finish_reason"]) for answer in answers] == [
        ([token], "stop"),
        ([token] * 4, "length"),
        ([token], "stop"),
        ([token] * 4, "length"),
    ]


def test_case_47_stop_ids_without_a_bias(tiny: Callable[[str], Path], answers: Callable[[str], Any]) -> None:
    """As above on the plain path, where tokens are not looked at one by one: any id of the answer may end it."""
    reference = answers("q3-text")
    prompt, tokens = reference.prompts[1], reference.continuations[1]
    with LLM(tiny("q3-text"), cuda_graph_max_bs=4, **SETTINGS) as llm:
        for stop in dict.fromkeys(tokens):
            params = SamplingParams(max_tokens=len(tokens), stop_token_ids=[stop])
            stopped, other = llm.generate([prompt, prompt], [params, greedy(len(tokens))], progress=False)
            assert stopped["token_ids"] == tokens[: tokens.index(stop) + 1]
            assert stopped["finish_reason"] == "stop"
            assert (other["token_ids"], other["finish_reason"]) == (tokens, "length")


@pytest.fixture
def text_llm(tiny: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(tiny("q3-text"), **SETTINGS) as made:
        yield made


@pytest.mark.parametrize("as_list", [True, False])
def test_case_48_a_stop_string_of_several_tokens(as_list: bool, text_llm: LLM, answers: Callable[[str], Any]) -> None:
    reference = answers("q3-text")
    prompt, tokens = reference.prompts[0], reference.continuations[0]
    pieces = [text_llm.tokenizer.decode([token]) for token in tokens]
    whole = text_llm.tokenizer.decode(tokens)
    stop = whole[len("".join(pieces[:4])) + 1 : len("".join(pieces[:8]))]
    assert len(stop) >= 3 and stop not in whole[: whole.index(stop) + len(stop) - 1]
    params = greedy(len(tokens), stop=[stop] if as_list else stop)
    (answer,) = text_llm.generate([prompt], params, progress=False)
    assert (answer["text"], answer["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    chunks = list(text_llm.stream(prompt, params))
    assert "".join(chunk.text for chunk in chunks) == answer["text"]
    assert chunks[-1].finish_reason == "stop"
    (other,) = text_llm.generate([prompt], greedy(len(tokens), stop=stop + "#no#"), progress=False)
    assert (other["text"], other["finish_reason"]) == (whole, "length")
