"""Which source says what about a token: random folders, compared with transformers."""

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
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from minisgl_core.errors import CheckpointError
from minisgl_core.tokenizer import Tokenizer, load_tokenizer

CONTENTS = ("<e>", "<p>", "<q>", "ab")
"""``ab`` is also a piece of the vocabulary."""
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
TEXTS = ("x<e> \n y", "a <p>  b<p>", "<q>x <q> y", "x ab cab  ab.", "<e><p> <q>ab", " <e>", "<new> x  <new>y")
ROLES = ("bos_token", "eos_token", "pad_token")


def base_tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*alphabet, "ab"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


flags = st.fixed_dictionaries({name: st.booleans() for name in FLAGS})
some_flags = st.fixed_dictionaries({}, optional={name: st.booleans() for name in FLAGS})
contents = st.sampled_from(CONTENTS)
new_or_known = st.sampled_from((*CONTENTS, "<new>"))


@st.composite
def token_objects(draw: st.DrawFn, strategy: st.SearchStrategy[str] = new_or_known) -> dict[str, Any]:
    return {"__type": "AddedToken", "content": draw(strategy), **draw(some_flags)}


named_tokens = st.one_of(new_or_known, token_objects(), st.none())


@st.composite
def folders(draw: st.DrawFn) -> dict[str, Any]:
    """The content of each file; a file may be absent."""
    files: dict[str, Any] = {
        "added": draw(st.lists(st.tuples(contents, flags), max_size=4, unique_by=lambda one: one[0]))
    }
    config: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {}, optional={**dict.fromkeys(ROLES, named_tokens), "split_special_tokens": st.booleans()}
        )
    )
    key = draw(st.sampled_from(["additional_special_tokens", "extra_special_tokens", None]))
    if key is not None:
        config[key] = draw(st.lists(st.one_of(new_or_known, token_objects()), max_size=2))
    if draw(st.booleans()):
        config["image_token"] = draw(new_or_known)
    if draw(st.booleans()) and "extra_special_tokens" not in config:
        config["extra_special_tokens"] = {"boi_token": draw(new_or_known)}
    if draw(st.booleans()):
        known = [content for content, _ in files["added"]]
        listed = [*known, *draw(st.lists(st.sampled_from(["<new>", *CONTENTS]), max_size=2))]
        decoder = {str(257 + i): {"content": one, **draw(flags)} for i, one in enumerate(dict.fromkeys(listed))}
        config["added_tokens_decoder"] = decoder
    if draw(st.booleans()):
        files["tokenizer_config.json"] = config
    if draw(st.booleans()):
        values = st.one_of(
            new_or_known, st.fixed_dictionaries({"content": new_or_known}, optional={n: st.booleans() for n in FLAGS})
        )
        special = draw(st.fixed_dictionaries({}, optional=dict.fromkeys(ROLES, values)))
        listed_as = draw(st.sampled_from(["additional_special_tokens", "extra_special_tokens", None]))
        if listed_as is not None:
            special[listed_as] = draw(st.lists(new_or_known, max_size=2))
        files["special_tokens_map.json"] = special
    if draw(st.booleans()):
        files["added_tokens.json"] = {"<new>": 300}
    return files


def write_folder(folder: Path, files: dict[str, Any]) -> None:
    backend = base_tokenizer()
    backend.add_tokens([AddedToken(content, **own) for content, own in files["added"]])
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        if name != "added":
            write_json(folder / name, content)


def loaded(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@settings(max_examples=150, deadline=None)
@given(folders())
def test_case_104_each_flag_comes_from_the_source_that_transformers_takes(files: dict[str, Any]) -> None:
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_folder(folder, files)
        theirs = PreTrainedTokenizerFast.from_pretrained(folder)
        ours = loaded(folder)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        decoder = ours.new_decoder()
        assert "".join(map(decoder.push, ids)) + decoder.flush() == ours.decode(ids), text
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))


@pytest.mark.parametrize("source", ["eos_token", "extra_special_tokens", "additional_special_tokens"])
def test_case_104_naming_a_token_keeps_its_flags(source: str, tmp_path: Path) -> None:
    write_folder(tmp_path, {"added": [("<e>", {"rstrip": True, "special": True})]})
    write_json(tmp_path / "tokenizer_config.json", {source: "<e>" if source == "eos_token" else ["<e>"]})
    tokenizer = loaded(tmp_path)
    assert tokenizer.encode("x<e> \n y") == [*tokenizer.encode("x"), tokenizer.token_id("<e>"), *tokenizer.encode("y")]


@pytest.mark.parametrize("image", ["<img>", {"__type": "AddedToken", "content": "<img>"}])
@pytest.mark.parametrize("place", ["extra_special_tokens", "model_specific_special_tokens", None])
def test_case_114_named_tokens_of_a_model_reach_its_template(place: str | None, image: object, tmp_path: Path) -> None:
    write_folder(tmp_path, {"added": []})
    template = "{{ boi_token }}{{ messages[0].content }}"
    own = {"boi_token": image}
    write_json(
        tmp_path / "tokenizer_config.json", {"chat_template": template, **(own if place is None else {place: own})}
    )
    tokenizer = loaded(tmp_path)
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<img>x"
    assert tokenizer.encode("<img>") == [257]


def test_a_special_tokens_map_that_is_not_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_folder(tmp_path, {"added": [], "tokenizer_config.json": {"added_tokens_decoder": {}, "pad_token": "<p>"}})
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": "<e>", "pad_token": {"content": "<p>"}})
    with caplog.at_level(logging.WARNING):
        assert loaded(tmp_path).special_tokens == {"pad_token": "<p>"}
    (record,) = caplog.records
    assert "`eos_token`" in record.getMessage() and "special_tokens_map.json" in record.getMessage()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": 7}, "`eos_token` of the tokenizer holds 7"),
        ({"extra_special_tokens": [{"text": "<e>"}]}, "`extra_special_tokens` of the tokenizer holds"),
        ({"added_tokens_decoder": {"257": "<e>"}}, "write a token as"),
        ({"eos_token": {"content": "<e>", "rstrp": True}}, "no flag `rstrp`; did you mean 'rstrip'"),
        ({"eos_token": {"content": "<e>", "rstrip": 1}}, "`rstrip` must be true or false"),
    ],
)
def test_what_is_no_token_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_folder(tmp_path, {"added": [], "tokenizer_config.json": config})
    with pytest.raises(CheckpointError, match=message):
        loaded(tmp_path)


def test_one_token_instead_of_a_list_in_the_special_tokens_map_is_refused(tmp_path: Path) -> None:
    special = {"additional_special_tokens": {"content": "<e>"}}
    write_folder(tmp_path, {"added": [], "special_tokens_map.json": special})
    with pytest.raises(CheckpointError, match=r"`additional_special_tokens` of the tokenizer holds .* must be list"):
        loaded(tmp_path)
