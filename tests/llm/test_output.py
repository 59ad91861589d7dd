"""Text of an answer, with a decoder that writes one known piece per token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from minisgl_core.core import SamplingParams
from minisgl_core.engine import TokenLogprobs
from minisgl_core.llm.output import Output, PromptFacts, completion
from minisgl_core.scheduler import TokenOut

PIECES = ["DEF", "G", "HI", "J", "K", "abc", "</s>", "\u20ac"]
EOS, EURO = 6, 7


class Pieces:
    """Token i writes PIECES[i]; the euro sign is held until the next token, as half a character would be."""

    def __init__(self) -> None:
        self._held = ""

    def new_decoder(self, prompt: Sequence[int], shown: Collection[int] = ()) -> Pieces:
        return Pieces()

    def special_text(self, token: int) -> str | None:
        return None

    def token_text(self, token: int) -> str:
        return PIECES[token]

    def push(self, token: int) -> str:
        text, self._held = self._held, ""
        if token == EURO:
            self._held = PIECES[token]
            return text
        return text + PIECES[token]

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def play(tokens: list[int], reason: str = "length", **params: Any) -> tuple[Output, list[str], list[bool]]:
    """The output, the text of each chunk, and after each token whether the scheduler was to be notified."""
    output = Output(SamplingParams(**params), Pieces(), PromptFacts(3))  # type: ignore[arg-type]
    texts, notified = [], []
    for index, token in enumerate(tokens):
        last = index == len(tokens) - 1
        notified.append(output.add(TokenOut(0, token, reason if last else None)))  # type: ignore[arg-type]
        chunk = output.take()
        texts.append(chunk.text if chunk else "-")
    return output, texts, notified


def test_text_comes_token_by_token() -> None:
    output, texts, _ = play([5, 0, 1])
    assert texts == ["abc", "DEF", "G"]
    assert completion([output], None).to_dict() == {
        "text": "abcDEFG",
        "token_ids": [5, 0, 1],
        "finish_reason": "length",
        "stop_reason": None,
        "prompt_tokens": 3,
        "cached_tokens": 0,
    }


def test_text_may_be_requested_late() -> None:
    late, (early, texts, _) = Output(SamplingParams(), Pieces(), PromptFacts(3)), play([5, EURO, 1, EOS], "stop")  # type: ignore[arg-type]
    for token in (5, EURO, 1):
        assert not late.add_token(token)
    chunk = late.take()
    assert chunk is not None
    assert chunk.text == "".join(texts[:3]) == "abc\u20acG"
    late.add(TokenOut(0, EOS, "stop"))
    assert completion([late], None) == completion([early], None)
    assert completion([late], None).text == completion([late], None).text == "abc\u20acG", "a stop token writes nothing"
    chunk = late.take()
    assert chunk is not None
    assert (chunk.text, chunk.token_ids) == ("", [EOS])


def test_text_that_is_not_certain_is_held_and_flushed_at_the_end() -> None:
    _, texts, _ = play([EURO, 0, EURO])
    assert texts == ["", "\u20acDEF", "\u20ac"]


@pytest.mark.parametrize("stop", ["DEFGHIJ", ["zzz", "DEFGHIJ"]])
def test_case_48_stop_string_over_several_tokens(stop: Any) -> None:
    output, texts, notified = play([5, 0, 1, 2, 3, 4], stop=stop)
    assert completion([output], None).text == "abc"
    assert texts[:4] == ["abc", "", "", ""]
    assert output.finish_reason == "stop"
    assert notified == [False, False, False, False, True, False]
    assert output.token_ids == [5, 0, 1, 2, 3], "what was under way when the stop string came is dropped"


def test_case_48_a_beginning_that_is_no_stop_string_is_sent_whole() -> None:
    output, texts, notified = play([0, 1, 2, 4], stop="DEFGHIJ")
    assert texts == ["", "", "", "DEFGHIK"]
    assert not any(notified)
    assert output.finish_reason == "length"


def test_a_held_beginning_is_sent_when_the_answer_ends() -> None:
    output, _, _ = play([5, 0, 1], stop="DEFGHIJ")
    assert completion([output], None).text == "abcDEFG"


def test_a_stop_string_in_the_last_token_needs_no_word_to_the_scheduler() -> None:
    output, _, notified = play([5, 1], stop="G")
    assert (completion([output], None).text, output.finish_reason, notified) == ("abc", "stop", [False, False])


def test_the_text_of_a_stop_token_is_not_emitted_but_its_id_is() -> None:
    output, _, _ = play([5, EOS], reason="stop")
    assert (completion([output], None).text, output.token_ids, output.finish_reason) == ("abc", [5, EOS], "stop")


def test_a_reader_between_the_stop_token_and_the_reason_sees_no_text_of_it() -> None:
    """The engine's thread adds the token first and the reason last; another thread may read in between."""
    output = Output(SamplingParams(), Pieces(), PromptFacts(3))  # type: ignore[arg-type]
    seen: list[str] = []

    class Watched(list[int]):
        def append(self, token: int) -> None:
            super().append(token)
            chunk = output.take()
            assert chunk is not None
            seen.append(chunk.text)

    output.token_ids = Watched()
    output.add(TokenOut(0, 5, None))
    output.add(TokenOut(0, EOS, "stop"))
    last = output.take()
    assert last is not None
    assert (seen, last.text, last.finish_reason) == (["abc", ""], "", "stop")
    assert completion([output], None).text == "abc"


def test_an_answer_taken_early_does_not_change() -> None:
    output = Output(SamplingParams(logprobs=0), Pieces(), PromptFacts(3))  # type: ignore[arg-type]
    output.add(TokenOut(0, 5, None, logprobs=TokenLogprobs(5, -0.5, [])))
    assert output._logprobs is not None
    output._logprobs.append(TokenLogprobs(0, -0.25, []))  # that of a token which is about to come
    early = completion([output], None)
    output.token_ids.append(0)
    assert (early.text, early.token_ids) == ("abc", [5])
    assert early.logprobs is not None and [entry.token_id for entry in early.logprobs] == [5]


def test_case_37_a_stop_token_first_gives_an_empty_text() -> None:
    output, _, _ = play([EOS], reason="stop")
    assert (completion([output], None).text, output.finish_reason) == ("", "stop")


def test_without_a_tokenizer_the_text_is_empty() -> None:
    output = Output(SamplingParams(), None, PromptFacts(1))
    output.add(TokenOut(0, 5, "length"))
    assert completion([output], None)["text"] == ""
    assert output.token_ids == [5]


def test_an_error_is_part_of_the_answer() -> None:
    output = Output(SamplingParams(), None, PromptFacts(1))
    output.add(TokenOut(0, None, "error", "NaN"))
    assert (completion([output], None)["error"], output.finish_reason) == ("NaN", "error")
    chunk = output.take()
    assert chunk is not None
    assert (chunk.error, chunk.token_ids) == ("NaN", [])


def test_no_stop_string_is_looked_for_in_the_text_of_min_tokens() -> None:
    output, texts, _ = play([5, 1, 0, 1, 2], stop="G", min_tokens=2)
    assert texts[:4] == ["abc", "G", "DEF", ""]
    assert (completion([output], None).text, output.stop_reason) == ("abcGDEF", "G")
    assert output.token_ids == [5, 1, 0, 1]
