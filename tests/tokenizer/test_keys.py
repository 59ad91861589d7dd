"""No key of a tokenizer file is accepted and ignored in silence."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from minisgl_core.errors import CheckpointError
from minisgl_core.inputs import Gate, warn_once
from minisgl_core.tokenizer import load_tokenizer
from minisgl_core.tokenizer.keys import SPECIAL_MAP_GATE, TOKENIZER_GATE

UNKNOWN = st.text("abcxyz_", min_size=3, max_size=12).map(lambda name: f"zz_{name}")
VALUES = st.sampled_from([None, True, False, 0, 7, 0.5, "x", "<e>", [], ["<e>"], {}, {"content": "<e>"}])
READ_ANYWAY = frozenset({"add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces"})
"""Their values may be warned about as well."""


class Log(logging.Handler):
    """What a call logs, as one text; the filter for repeated warnings starts empty."""

    def __enter__(self) -> Log:
        warn_once.cache_clear()
        self.text = ""
        logging.getLogger("minisgl_core").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("minisgl_core").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def log_of(folder: Path, backend: tokenizers.Tokenizer | None = None, **files: dict[str, Any]) -> str:
    (backend or byte_level()).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    with Log() as log:
        assert load_tokenizer(folder) is not None
    return log.text


@pytest.mark.parametrize(
    ("name", "gate"), [("tokenizer_config", TOKENIZER_GATE), ("special_tokens_map", SPECIAL_MAP_GATE)]
)
def test_no_key_is_ignored_in_silence(name: str, gate: Gate) -> None:
    keys = st.one_of(st.sampled_from(sorted(gate.rules)), UNKNOWN)

    @settings(max_examples=150, deadline=None)
    @given(st.dictionaries(keys, VALUES, max_size=6))
    def check(content: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as place:
            try:
                text = log_of(Path(place), **{name: content})
            except CheckpointError as error:
                refusal = error
            else:
                refusal = None
        if refusal is not None:
            assert refusal.field in content and refusal.remedy
            return
        for key, value in content.items():
            rule = gate.rule(key)
            warned = value is not None if rule is None else rule.fate == "warned" and rule.concerns(value)
            assert (f"`{key}`" in text) == warned or key in READ_ANYWAY

    check()


def test_every_key_of_published_tokenizers_is_known() -> None:
    """What the configs of Llama 2, Llama 3, Qwen 2, Mistral, Gemma, SmolLM and Phi hold."""
    published = """add_bos_token add_eos_token add_prefix_space added_tokens_decoder additional_special_tokens bos_token
        chat_template clean_up_tokenization_spaces eos_token errors extra_special_tokens legacy model_input_names
        model_max_length pad_token padding_side processor_class sp_model_kwargs spaces_between_special_tokens
        split_special_tokens tokenizer_class truncation_side unk_token use_default_system_prompt vocab_size"""
    assert all(TOKENIZER_GATE.rule(key) is not None for key in published.split())


def with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return backend


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("says", [True, False])
def test_a_flag_that_contradicts_tokenizer_json_is_named(adds: bool, says: bool, tmp_path: Path) -> None:
    backend = with_bos(byte_level()) if adds else byte_level()
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": says, "add_eos_token": False}
    text = log_of(tmp_path, backend, tokenizer_config=config)
    assert ("`add_bos_token`" in text) == (adds != says)
    assert "`add_eos_token`" not in text


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("how", ["byte level", "metaspace", "normalizer", "none"])
def test_a_prefix_space_that_contradicts_tokenizer_json_is_named(how: str, says: bool, tmp_path: Path) -> None:
    backend = byte_level()
    if how == "byte level":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    if how == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    if how == "normalizer":
        backend.normalizer, backend.pre_tokenizer = normalizers.Prepend("\u2581"), None
    text = log_of(tmp_path, backend, tokenizer_config={"add_prefix_space": says})
    assert ("`add_prefix_space`" in text) == (says != (how != "none"))


def test_spaces_are_not_cleaned_up_and_bpe_never_wanted_it(tmp_path: Path) -> None:
    config = {"clean_up_tokenization_spaces": True}
    assert log_of(tmp_path, tokenizer_config=config) == ""
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert "`clean_up_tokenization_spaces`" in log_of(tmp_path, words, tokenizer_config=config)


def test_special_tokens_may_be_cut_like_text(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    config = {"eos_token": "<e>", "split_special_tokens": True}
    assert log_of(tmp_path, tokenizer_config=config) == ""
    ours, theirs = load_tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours is not None and ours.encode("a<e>b") == theirs.encode("a<e>b")
    assert len(ours.encode("a<e>b")) == 5


def test_an_id_that_the_vocabulary_does_not_give_is_named(tmp_path: Path) -> None:
    text = log_of(tmp_path, tokenizer_config={"added_tokens_decoder": {"300": {"content": "<e>"}}})
    assert "'<e>' the id 300, but its place in the vocabulary is 256" in text


@pytest.mark.parametrize("template", [7, [{"name": "default"}], [{"template": "x"}], {"default": 1}, ["x"]])
def test_a_chat_template_of_a_wrong_type_is_refused(template: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="`chat_template` of the tokenizer is"):
        log_of(tmp_path, tokenizer_config={"chat_template": template})
