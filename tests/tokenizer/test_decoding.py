from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from minisgl_core.tokenizer import ByteLevelDecoder, Tokenizer, WindowDecoder


def byte_level() -> Tokenizer:
    """Every single byte is a token, then some longer ones; 260 is special, 261 an added word with a space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġthe", "Ã©", "Ġæ", "ðŁ"]  # " the", "é", a space and a first byte of three, two bytes of four
    vocab = {token: number for number, token in enumerate([*alphabet, *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<s>", special=True), AddedToken("two words", special=False)])
    return Tokenizer(backend)


def sentence_piece() -> Tokenizer:
    """As Llama 2: pieces with U+2581 for a space, unknown characters as byte tokens, one leading space dropped."""
    pieces = ["<s>", "▁", "▁a", "b", "▁▁", "中", "▁the", "."]
    vocab = {token: i for i, token in enumerate([*pieces, *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


BYTES, PIECES = byte_level(), sentence_piece()


def stream(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    decoder = tokenizer.new_decoder()
    return [*map(decoder.push, ids), decoder.flush()]


def ids_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One byte token per byte."""
    if tokenizer is PIECES:
        return [8 + byte for byte in data]
    text = {value: number for number, value in ((n, BYTES._backend.id_to_token(n)) for n in range(256))}
    chars = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    return [text[chars(chr(byte))[0][0]] if byte < 128 else _high_byte(byte) for byte in data]


def _high_byte(byte: int) -> int:
    """The token of a byte above 127: encode a character that contains it."""
    for lead in (b"", b"\xc3", b"\xc4", b"\xe0\xa4", b"\xf0\x9f\x98", b"\xf0\x9f"):
        for tail in (b"", b"\x80", b"\x80\x80", b"\xa0\x80", b"\x90\x80\x80", b"\x80\x80\x80"):
            data = lead + bytes([byte]) + tail
            try:
                text = data.decode()
            except UnicodeDecodeError:
                continue
            if len(text) == 1:
                mapped = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
                token = BYTES._backend.token_to_id(mapped[len(lead)])
                assert token is not None
                return int(token)
    raise ValueError(f"byte {byte:#x} stands in no character")


def test_each_kind_of_tokenizer_has_its_decoder() -> None:
    assert isinstance(BYTES.new_decoder(), ByteLevelDecoder)
    assert isinstance(PIECES.new_decoder(), WindowDecoder)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize("text", ["ď", "🎉", "漢字かな交じり文", "नमस्ते", "a🎉b", "👩‍👩‍👧"])
def test_case_49_characters_in_pieces(tokenizer: Tokenizer, text: str) -> None:
    parts = stream(tokenizer, ids_of(tokenizer, text.encode()))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_case_49_a_character_leaves_with_its_last_byte() -> None:
    assert stream(BYTES, ids_of(BYTES, "ď!".encode())) == ["", "ď", "!", ""]


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "sentencepiece"])
def test_case_49_cut_after_two_of_three_bytes(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "中".encode()[:2])
    decoder = tokenizer.new_decoder()
    assert [decoder.push(token) for token in ids] == ["", ""]
    assert decoder.flush() == tokenizer.decode(ids) != ""
    assert decoder.flush() == ""


def test_case_49_half_a_character_in_the_prompt_is_no_output() -> None:
    """The prompt ended with the first byte of a character; the output's own bytes are all that is decoded."""
    output = ids_of(BYTES, "ď".encode()[1:] + b"x")
    assert "".join(stream(BYTES, output)) == BYTES.decode(output) == "\ufffdx"


def test_case_08_ids_beyond_the_tokenizer_write_nothing() -> None:
    for tokenizer in (BYTES, PIECES):
        size = tokenizer.vocab_size
        ids = [*ids_of(tokenizer, b"a"), size, 10**6, -1, *ids_of(tokenizer, b"b")]
        assert tokenizer.decode(ids) == "".join(stream(tokenizer, ids)) == "ab"


def test_special_tokens_write_nothing_and_added_words_themselves() -> None:
    assert "".join(stream(BYTES, [260, 261, 256])) == BYTES.decode([260, 261, 256]) == "two words the"


def test_sentencepiece_drops_one_leading_space_only() -> None:
    assert "".join(stream(PIECES, [0, 6, 2])) == "the a"
    assert "".join(stream(PIECES, [1, 4, 2])) == PIECES.decode([1, 4, 2]) == "   a"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 270), max_size=40))
def test_byte_level_stream_equals_decoding_all_ids(ids: list[int]) -> None:
    parts = stream(BYTES, ids)
    assert "".join(parts) == BYTES.decode(ids)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 7), st.integers(0, 300)), max_size=14))
def test_sentencepiece_stream_equals_decoding_all_ids(ids: list[int]) -> None:
    """Up to the number of tokens that are held: a longer run leaves before it is known to be spoilt."""
    assert "".join(stream(PIECES, ids)) == PIECES.decode(ids)


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=10, max_size=40))
def test_long_runs_of_valid_byte_tokens(text: str) -> None:
    ids = ids_of(PIECES, text.encode())
    parts = stream(PIECES, ids)
    assert "".join(parts) == PIECES.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize(("tokenizer", "token"), [(BYTES, _high_byte(0xF0)), (PIECES, 8 + 0xFF)])
def test_rubbish_does_not_pile_up(tokenizer: Tokenizer, token: int) -> None:
    """A model that emits broken bytes for ever is decoded in constant time per token."""
    decoder = tokenizer.new_decoder()
    begin = time.process_time()
    text = "".join(decoder.push(token) for _ in range(2000)) + decoder.flush()
    assert text == tokenizer.decode([token] * 2000)
    assert time.process_time() - begin < 5.0
    held: Any = getattr(decoder, "_held")  # noqa: B009 - private by design
    assert len(held) <= 20


def continued(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    decoder = tokenizer.new_decoder(prompt)
    return "".join(map(decoder.push, ids)) + decoder.flush()


def test_case_109_the_first_space_of_an_answer_stays() -> None:
    assert continued(PIECES, [6], [2, 3]) == " ab"
    assert continued(PIECES, np.array([0, 6], dtype=np.int32), [6]) == " the"
    assert continued(PIECES, [0], [6]) == continued(PIECES, [], [6]) == "the"


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "sentencepiece"])
@settings(max_examples=150, deadline=None)
@given(prompt=st.text("ab .中é", max_size=8), text=st.text("ab .中é", max_size=8))
def test_case_109_prompt_and_text_are_the_whole_text(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    """The answer's ids are those of a text that follows another."""
    ids, before = tokenizer.encode(prompt), tokenizer.encode("." + text)
    rest = before[len(tokenizer.encode(".")) :]
    if tokenizer.encode(".") + rest != before:
        return
    assert tokenizer.decode(ids) + continued(tokenizer, ids, rest) == tokenizer.decode([*ids, *rest])


@pytest.mark.parametrize("prompt", [[6, 8 + 0xE4], [8 + 0xE4], [6, 8 + 0xE4, 8 + 0xB8], [6, 0, 8 + 0xE4]])
def test_case_49_and_109_half_a_character_of_the_prompt_does_not_join_the_answer(prompt: list[int]) -> None:
    assert continued(PIECES, prompt, [8 + 0xAD, 3]) == "\ufffdb"
