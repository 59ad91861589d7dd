"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from ..errors import CheckpointError
from ..formats import read_json
from .tokenizer import Tokenizer

__all__ = ["load_hf_tokenizer"]

_ROLES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SLOW_FILES: Final = ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")


def load_hf_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer; None if it has no tokenizer files.

    ``tokenizer.json`` is read directly, and says whether BOS is added (as for transformers 5, which ignores
    ``add_bos_token`` beside it). Folders that only have an older format need transformers to convert it.
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
    named = _named_tokens(_optional(folder / "special_tokens_map.json") | config)
    _add_tokens(backend, config, named)
    roles = {role: token.content for role, token in named.items()}
    return Tokenizer(backend, special_tokens=roles, chat_template=_chat_template(folder, config))


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token(value: Any) -> AddedToken | None:
    """A token written as text or as an object."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if isinstance(value, Mapping) and isinstance(value.get("content"), str):
        known = ("lstrip", "rstrip", "single_word", "normalized", "special")
        return AddedToken(value["content"], **{key: bool(value[key]) for key in known if key in value})
    return None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    return {role: token for role in _ROLES if (token := _token(config.get(role))) is not None}


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, AddedToken]) -> None:
    """Tokens that tokenizer_config.json adds to those of tokenizer.json, by id; then the named ones as special."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    extra = [token for _, value in listed if (token := _token(value)) is not None and token.content not in present]
    if extra:
        backend.add_tokens(extra)
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    values = more.values() if isinstance(more, Mapping) else more
    special = [*named.values(), *(token for value in values if (token := _token(value)) is not None)]
    if special:
        backend.add_special_tokens(special)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """From files of its own (transformers 5) or from tokenizer_config.json (4): one template, or several by name."""
    named = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("additional_chat_templates/*.jinja")}
    own = folder / "chat_template.jinja"
    if own.exists():
        return {"default": own.read_text(encoding="utf-8"), **named}
    given = config.get("chat_template")
    if given is None:
        given = _optional(folder / "chat_template.json").get("chat_template")
    if isinstance(given, list):
        return {str(item["name"]): str(item["template"]) for item in given}
    return given if isinstance(given, str | dict) else None


def _convert(folder: Path, name: str) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CheckpointError(
            f"the tokenizer of {str(folder)!r} is in an older format ({name}) that only transformers reads",
            field="tokenizer",
            value=name,
            remedy="pip install transformers sentencepiece, or add a tokenizer.json",
        ) from error
    try:
        slow = AutoTokenizer.from_pretrained(folder)
        roles = {role: str(token) for role in _ROLES if (token := getattr(slow, role, None)) is not None}
        return Tokenizer(slow.backend_tokenizer, special_tokens=roles, chat_template=slow.chat_template)
    except Exception as error:  # whatever a conversion may raise
        raise CheckpointError(
            f"transformers cannot read the tokenizer {name} of {str(folder)!r}: {str(error).splitlines()[0]}",
            field="tokenizer",
            value=name,
            remedy="add a tokenizer.json",
        ) from error
