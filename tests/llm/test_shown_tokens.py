"""Special tokens that a parser has to see are part of the text of its answer, and of no other."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from minisgl_core.core import SamplingParams
from minisgl_core.llm.output import Output, PromptFacts
from minisgl_core.tokenizer import Tokenizer


def tokenizer() -> Tokenizer:
    """One token for each byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|python_tag|>", "<|other|>"])
    return Tokenizer(backend)


def text_of(shown: bool, stop: tuple[str, ...] = ()) -> str:
    own = tokenizer()
    ids = own.special_ids(["<|python_tag|>", "<tool_call>"])
    assert len(ids) == 1
    output = Output(SamplingParams(stop=stop), own, PromptFacts(1), shown=ids if shown else frozenset())
    pieces = []
    for token in own.encode("aé<|python_tag|>{<|other|>}b"):
        output.add_token(token)
        if (chunk := output.take()) is not None:
            pieces.append(chunk.text)
    output.finish_reason = output.finish_reason or "length"
    last = output.take()
    return "".join(pieces) + (last.text if last else "")


def test_only_the_tokens_that_are_shown_have_a_text() -> None:
    assert text_of(shown=True) == "aé<|python_tag|>{}b"
    assert text_of(shown=False) == "aé{}b"


def test_stop_strings_see_them_as_text() -> None:
    assert text_of(shown=True, stop=("}b",)) == "aé<|python_tag|>{"
    assert text_of(shown=False, stop=("}b",)) == "aé{"
