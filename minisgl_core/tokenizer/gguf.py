"""Builds a tokenizer from GGUF metadata: byte-level BPE with the pre-tokenizer that the model was trained with."""

from __future__ import annotations

from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ..formats import GGUFFile
from .keys import GGUF_GATE
from .tokenizer import Tokenizer

__all__ = ["gguf_chat_templates", "load_gguf_tokenizer"]

_PREFIX: Final = "tokenizer."
_TEMPLATE: Final = "tokenizer.chat_template"
_CONTROL, _USER_DEFINED = 3, 4
"""Token types that are matched in the text before BPE; control tokens produce no text."""

_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The split patterns of Llama 3 (up to three digits together) and Qwen2 (single digits)."""
_KINDS: Final = ("gpt-2", "smollm", "llama-bpe", "qwen2")


def load_gguf_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """The tokenizer of a GGUF file; None if the file has none.

    A tokenizer with an unknown pre-tokenizer refuses to encode text: a guess would silently change the model's answers.
    """
    model = file.metadata.get("tokenizer.ggml.model")
    if model is None:
        return None
    kind = file.metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or kind not in _KINDS:
        return Tokenizer.without_text(
            f"GGUF file {str(file.path)!r} has a tokenizer of model {model!r} with pre-tokenizer {kind!r}, and minisgl "
            f"builds model 'gpt2' with one of {', '.join(_KINDS)}; the model's original folder may be read"
        )
    GGUF_GATE.check({key: file.metadata[key] for key in file.metadata if key.startswith(_PREFIX)}, str(file.path))
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    backend = _backend(tokens, file.require("tokenizer.ggml.merges"), kind)
    _add_special(backend, tokens, file.metadata.get("tokenizer.ggml.token_type", []))
    roles = _roles(file, tokens)
    add_bos = file.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama-bpe")
    add_eos = file.metadata.get("tokenizer.ggml.add_eos_token", False)
    backend.post_processor = _surround(
        backend, roles.get("bos_token") if add_bos else None, roles.get("eos_token") if add_eos else None
    )
    return Tokenizer(backend, special_tokens=roles, chat_template=gguf_chat_templates(file))


def gguf_chat_templates(file: GGUFFile) -> dict[str, str]:
    """The file's template as ``default``, and its named templates."""
    named = {
        key.removeprefix(f"{_TEMPLATE}."): text
        for key, text in file.metadata.items()
        if key.startswith(f"{_TEMPLATE}.")
    }
    return named | ({"default": file.metadata[_TEMPLATE]} if file.metadata.get(_TEMPLATE) else {})


def _backend(tokens: list[str], merges: list[str], kind: str) -> tokenizers.Tokenizer:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=kind == "llama-bpe"))
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(kind)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(kind: str) -> Any:
    """The pre-tokenizer of each kind. SmolLM splits off every digit, then splits like GPT-2."""
    if kind == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    words = Regex(_WORDS % (3 if kind == "llama-bpe" else 1))
    split = pre_tokenizers.Split(words, behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _add_special(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [token for token, number in zip(tokens, types, strict=False) if number == kind]
        backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in found])


def _roles(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    keys = {
        "bos_token": "bos",
        "eos_token": "eos",
        "unk_token": "unknown",
        "pad_token": "padding",
        "sep_token": "seperator",
        "cls_token": "cls",
        "mask_token": "mask",
    }
    ids = {role: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for role, name in keys.items()}
    return {role: tokens[number] for role, number in ids.items() if number is not None and number < len(tokens)}


def _surround(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> processors.TemplateProcessing:
    """Post-processing that adds BOS before and EOS after each prompt, where they are given."""
    words = [word for word in (bos, "$A", eos) if word is not None]
    used = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    return processors.TemplateProcessing(single=" ".join(words), special_tokens=used)
