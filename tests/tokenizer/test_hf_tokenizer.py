from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from minisgl_core.errors import AdmissionError, CheckpointError
from minisgl_core.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "The capital of France is",
    "a  12  345",
    "  leading and trailing  ",
    "naïve café — 漢字 🎉\n\n\tdef f(x):\r\n",
    "<|im_start|>user\nhi<|im_end|>",
    "it's we'll I'M",
    "",
]


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    """A copy of the tiny tokenizer's files, to be changed."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copy(tiny("q3-text") / name, tmp_path)
    return tmp_path


def change(folder: Path, **config: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def loaded(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def assert_like_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = loaded(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.vocab_size == len(theirs)


def test_same_ids_as_transformers(folder: Path) -> None:
    assert_like_transformers(folder)


def add_bos_by_tokenizer_json(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = ("<|endoftext|>", 0)
    backend.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    backend.save(str(folder / "tokenizer.json"))
    change(folder, bos_token=bos[0])


def test_bos_that_tokenizer_json_adds(folder: Path) -> None:
    add_bos_by_tokenizer_json(folder)
    assert_like_transformers(folder)
    assert loaded(folder).encode("x")[0] == 0


@pytest.mark.parametrize("flag", [True, False])
def test_tokenizer_json_decides_about_bos(folder: Path, flag: bool) -> None:
    if not flag:
        add_bos_by_tokenizer_json(folder)
    change(folder, bos_token="<|endoftext|>", add_bos_token=flag)
    assert_like_transformers(folder)


def test_tokens_that_only_the_config_adds(folder: Path) -> None:
    added = {"content": "<think>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    change(folder, added_tokens_decoder={"500": {**added, "special": False}})
    assert_like_transformers(folder)
    ours = loaded(folder)
    assert ours.encode("<think>") == [500]
    assert ours.decode([500]) == "<think>"


def test_special_tokens_written_as_objects(folder: Path) -> None:
    change(folder, eos_token={"__type": "AddedToken", "content": "<|endoftext|>", "special": True})
    assert_like_transformers(folder)
    assert loaded(folder).eos_token_ids == (0,)


def test_special_tokens_map_of_old_folders(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_start|>"}))
    assert loaded(folder).eos_token_ids == (1,)


def test_tokenizer_json_alone_is_enough(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    tokenizer = loaded(folder)
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.chat_template is None


def test_truncation_saved_with_the_tokenizer_is_not_applied(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    text = "one two three four five"
    tokenizer = loaded(folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_folder_without_tokenizer_files(tiny: Any) -> None:
    assert load_tokenizer(tiny("q3")) is None


def test_a_gguf_without_tokenizer(tiny: Any) -> None:
    assert load_tokenizer(tiny("s93-gguf")) is None


def test_a_broken_tokenizer_file(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json' cannot be read") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_text_that_is_no_unicode(folder: Path) -> None:
    with pytest.raises(AdmissionError, match="not valid Unicode"):
        loaded(folder).encode("half \ud83d")


def test_an_older_format_is_converted_by_transformers(tmp_path: Path) -> None:
    """A GPT-2 style vocab.json with merges.txt; a model type makes AutoTokenizer pick the class."""
    from tokenizers import pre_tokenizers

    vocab = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"])}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    tokenizer = loaded(tmp_path)
    assert tokenizer.decode(tokenizer.encode("abc 漢")) == "abc 漢"
    assert tokenizer.eos_token_ids == (256,)
