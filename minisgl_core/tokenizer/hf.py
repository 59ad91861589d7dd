"""Loads the tokenizer of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers

from ..errors import CheckpointError
from ..formats import read_json
from ..inputs import warn_once
from .added import add_tokens, without_token_names
from .keys import SPECIAL_MAP_GATE, TOKENIZER_GATE
from .tokenizer import Tokenizer

__all__ = ["hf_chat_templates", "load_hf_tokenizer"]

_SLOW_FILES: Final = ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")


def load_hf_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer; None if it has no tokenizer files.

    ``tokenizer.json`` is read directly, and decides whether BOS is added; like transformers 5, this ignores
    ``add_bos_token``. Folders that only have an older format are converted by transformers.
    """
    if not (folder / "tokenizer.json").exists():
        slow = [name for name in _SLOW_FILES if (folder / name).exists()]
        return _convert(folder, slow[0]) if slow else None
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{str(folder / 'tokenizer.json')!r} cannot be read: {error}",
            field="tokenizer.json",
            value=str(folder),
            remedy="download it again or upgrade tokenizers",
        ) from error
    backend.no_truncation()
    backend.no_padding()
    config = _optional(folder / "tokenizer_config.json")
    _check_files(backend, folder, config)
    named = add_tokens(backend, folder, config)
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    _warn_of_contradictions(backend, config, named, str(folder / "tokenizer_config.json"))
    return Tokenizer(backend, special_tokens=named, chat_template=hf_chat_templates(folder))


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _check_files(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Warn about keys that are not used."""
    special_file, config_file = folder / "special_tokens_map.json", folder / "tokenizer_config.json"
    TOKENIZER_GATE.check(without_token_names(config), str(config_file))
    SPECIAL_MAP_GATE.check(without_token_names(_optional(special_file)), str(special_file))
    if config.get("clean_up_tokenization_spaces") and not isinstance(backend.model, tokenizers.models.BPE):
        warn_once(f"`clean_up_tokenization_spaces` in {str(config_file)!r} is ignored: no space is removed")


def _warn_of_contradictions(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str], file: str
) -> None:
    """Warn about keys that contradict tokenizer.json. As in transformers 5 tokenizer.json decides; other programs may
    differ.
    """
    around = [backend.id_to_token(number) for number in backend.encode("").ids]
    ends = {
        "add_bos_token": (named.get("bos_token"), around[:1]),
        "add_eos_token": (named.get("eos_token"), around[-1:]),
    }
    found = {key: [token] == place for key, (token, place) in ends.items() if token is not None}
    found["add_prefix_space"] = _adds_space(backend)
    for key, value in found.items():
        if isinstance(config.get(key), bool) and config[key] != value:
            warn_once(f"`{key}` in {file!r} is {config[key]!r}, but tokenizer.json does otherwise and decides")


def _adds_space(backend: tokenizers.Tokenizer) -> bool:
    """True if a space is added before the first word of a text."""
    if backend.normalizer is not None and backend.normalizer.normalize_str("a") in ("▁a", " a"):
        return True
    if backend.pre_tokenizer is None:
        return False
    words = backend.pre_tokenizer.pre_tokenize_str("a")
    return bool(words) and words[0][0] in ("Ġa", "▁a", "Ġ", "▁")


def hf_chat_templates(folder: Path) -> dict[str, str]:
    """The chat template, or several by name, from separate files (transformers 5) or from tokenizer_config.json (4).

    Files take precedence over the config; only a default that no file defines is read from there.
    """
    files = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("additional_chat_templates/*.jinja")}
    own = folder / "chat_template.jinja"
    if own.exists():
        return {**files, "default": own.read_text(encoding="utf-8")}
    given = _optional(folder / "tokenizer_config.json").get("chat_template")
    if given is None:
        given = _optional(folder / "chat_template.json").get("chat_template")
    by_name = _templates(given)
    return {name: text for name, text in by_name.items() if name == "default" or not files} | files


def _templates(given: Any) -> dict[str, str]:
    """The value of ``chat_template``: a text, texts by name, or a list of ``{"name", "template"}``."""
    try:
        named = {item["name"]: item["template"] for item in given} if isinstance(given, list) else given
    except (KeyError, TypeError):
        named = given
    if isinstance(named, str):
        return {"default": named}
    if named is None:
        return {}
    if not isinstance(named, Mapping) or not all(isinstance(one, str) for pair in named.items() for one in pair):
        raise CheckpointError(
            f"`chat_template` of the tokenizer is {given!r:.80}",
            field="chat_template",
            value=given,
            remedy='it must be a text or a list of {"name": ..., "template": ...}',
        )
    return dict(named)


def _convert(folder: Path, name: str) -> Tokenizer:
    """Convert a tokenizer from an older format. If transformers cannot convert it, the model still serves token ids."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return Tokenizer.without_text(
            f"the tokenizer of {str(folder)!r} is in an older format ({name}) that only transformers reads; "
            f"pip install transformers sentencepiece, or add a tokenizer.json"
        )
    try:
        slow = AutoTokenizer.from_pretrained(folder)
        return Tokenizer(
            slow.backend_tokenizer, special_tokens=slow.special_tokens_map, chat_template=slow.chat_template
        )
    except Exception as error:  # a conversion may raise anything
        return Tokenizer.without_text(
            f"transformers cannot read the tokenizer {name} of {str(folder)!r}: {str(error).partition(chr(10))[0]}; "
            f"add a tokenizer.json"
        )
