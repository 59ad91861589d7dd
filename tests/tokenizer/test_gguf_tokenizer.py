from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from minisgl_core.errors import AdmissionError
from minisgl_core.inputs import warn_once
from minisgl_core.tokenizer import Tokenizer, load_tokenizer
from minisgl_core.tokenizer.keys import GGUF_GATE

TEXTS = [
    "a  12",
    "a 1234567 b",
    "x = 3.14159; y = ½ ²",
    "  two  spaces   three\n\n\nlines\r\n\ttab ",
    "It's we'll I'M DON'T",
    "naïve café e\u0301 漢字 🎉👩‍👩‍👧",
    "hello<|im_end|> world<|im_start|>",
    "١٢٣ 一二三",
]


@pytest.fixture(scope="module")
def trained(tiny: Any) -> dict[str, Any]:
    """Vocabulary and merges of the tiny tokenizer."""
    content = json.loads((tiny("q3-text") / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    return {"tokens": sorted(vocab, key=vocab.__getitem__), "merges": [tuple(m) for m in content["model"]["merges"]]}


def write(
    path: Path,
    trained: dict[str, Any],
    pre: str,
    model: str = "gpt2",
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **flags: bool,
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(trained["tokens"])
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in trained["tokens"]])
    writer.add_token_merges([" ".join(merge) for merge in trained["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    more(writer)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.add_tensor("output.weight", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loaded(path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    return tokenizer


QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def hf_tokenizer(trained: dict[str, Any], pre: str) -> tokenizers.Tokenizer:
    """As the tokenizer.json of a model of that kind has it."""
    vocab = {token: i for i, token in enumerate(trained["tokens"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, trained["merges"]))
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    backend.pre_tokenizer = {
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]),
        "gpt-2": gpt2,
        "qwen2": pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
    }[pre]
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([token for token in trained["tokens"] if token.startswith("<|")])
    return backend


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2"])
def test_same_ids_as_the_models_tokenizer_json(trained: dict[str, Any], tmp_path: Path, pre: str) -> None:
    ours, theirs = loaded(write(tmp_path / "m.gguf", trained, pre)), hf_tokenizer(trained, pre)
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids), text


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer._backend.id_to_token(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def test_smollm_sets_each_digit_apart(trained: dict[str, Any], tmp_path: Path) -> None:
    """The vocabulary could join the second space to the digit; the model never saw that."""
    joined = {"tokens": [*trained["tokens"], "Ġ1", "12"], "merges": [*trained["merges"], ("Ġ", "1"), ("1", "2")]}
    assert pieces(loaded(write(tmp_path / "s.gguf", joined, "smollm")), "a 12") == ["a", "Ġ", "1", "2"]
    assert pieces(loaded(write(tmp_path / "g.gguf", joined, "gpt-2")), "a 12") == ["a", "Ġ1", "2"]


def test_llama3_takes_three_digits_together(trained: dict[str, Any], tmp_path: Path) -> None:
    numbers = ["12", "123", "45", "34"]
    merges = [("1", "2"), ("12", "3"), ("4", "5"), ("3", "4")]
    more = {"tokens": [*trained["tokens"], *numbers], "merges": [*trained["merges"], *merges]}
    assert pieces(loaded(write(tmp_path / "l.gguf", more, "llama-bpe")), "12345") == ["123", "45"]
    assert pieces(loaded(write(tmp_path / "q.gguf", more, "qwen2")), "12345") == ["1", "2", "3", "4", "5"]


def test_llama3_takes_whole_words_of_the_vocabulary_without_merges(trained: dict[str, Any], tmp_path: Path) -> None:
    more = {**trained, "tokens": [*trained["tokens"], "qzx"]}
    assert pieces(loaded(write(tmp_path / "l.gguf", more, "llama-bpe")), "qzx") == ["qzx"]
    assert pieces(loaded(write(tmp_path / "q.gguf", more, "qwen2")), "qzx") == ["q", "z", "x"]


@pytest.mark.parametrize(
    ("pre", "flags", "first"),
    [
        ("smollm", {}, None),
        ("llama-bpe", {}, 1),
        ("llama-bpe", {"add_bos_token": False}, None),
        ("smollm", {"add_bos_token": True}, 1),
    ],
)
def test_bos(trained: dict[str, Any], tmp_path: Path, pre: str, flags: dict[str, bool], first: int | None) -> None:
    ids = loaded(write(tmp_path / "m.gguf", trained, pre, **flags)).encode("x")
    assert (ids[0] if ids[0] < 3 else None) == first


def test_special_tokens_and_template(trained: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = loaded(write(tmp_path / "m.gguf", trained, "smollm", add_bos_token=True))
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.vocab_size == len(trained["tokens"])
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<|im_start|>x"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}])[0] == 1
    assert len(tokenizer.apply_chat_template([{"role": "user", "content": "x"}])) == 2
    assert tokenizer.decode([1, *tokenizer.encode("x", add_special_tokens=False), 2]) == "x"


@pytest.mark.parametrize(("model", "pre"), [("gpt2", "tekken"), ("llama", "default")])
def test_case_111_text_is_refused_by_rules_we_do_not_have(
    trained: dict[str, Any], tmp_path: Path, model: str, pre: str
) -> None:
    tokenizer = loaded(write(tmp_path / "m.gguf", trained, pre, model))
    with pytest.raises(AdmissionError, match=rf"model '{model}' with pre-tokenizer '{pre}', and minisgl builds"):
        tokenizer.encode("a")
    decoder = tokenizer.new_decoder([1, 2])
    assert (decoder.push(5), decoder.flush(), tokenizer.decode([5])) == ("", "", "")


def test_an_older_format_that_cannot_be_converted_serves_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.model").write_bytes(b"no protobuf")
    with pytest.raises(AdmissionError, match="transformers cannot read the tokenizer"):
        loaded(tmp_path).encode("a")


def log_of(path: Path) -> str:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    warn_once.cache_clear()
    logging.getLogger("minisgl_core").addHandler(handler)
    try:
        loaded(path)
    finally:
        logging.getLogger("minisgl_core").removeHandler(handler)
    return "\n".join(lines)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_tokenizer_key_is_ignored_in_silence(trained: dict[str, Any], data: st.DataObject) -> None:
    optional = [key for key in GGUF_GATE.rules if key.endswith(("_prefix", "_whitespaces", "_sep_token", "_count"))]
    unknown = st.text("abc", min_size=3, max_size=8).map(lambda name: f"tokenizer.ggml.zz_{name}")
    keys = data.draw(st.dictionaries(st.one_of(st.sampled_from(optional), unknown), st.booleans(), max_size=4))
    short = {key.removeprefix("tokenizer.ggml."): value for key, value in keys.items()}
    with tempfile.TemporaryDirectory() as place:
        text = log_of(write(Path(place) / "m.gguf", trained, "smollm", **short))
    for key, value in keys.items():
        rule = GGUF_GATE.rule(key)
        warned = rule is None or (rule.fate == "warned" and rule.concerns(value))
        assert (f"`{key}`" in text) == warned


def test_every_key_that_writers_know_has_a_rule() -> None:
    """The keys of the gguf package."""
    keys = [value for name, value in vars(gguf.Keys.Tokenizer).items() if not name.startswith("_")]
    assert [key for key in keys if GGUF_GATE.rule(key.format(name="x")) is None] == []


def test_several_templates_by_name(trained: dict[str, Any], tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_string("tokenizer.chat_template.tool_use", "tools")

    tokenizer = loaded(write(tmp_path / "m.gguf", trained, "smollm", more=more))
    chat = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(chat) == "<|im_start|>x"
    assert tokenizer.render_chat(chat, tools=[{"name": "f"}]) == "tools"
