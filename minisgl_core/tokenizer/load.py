"""Loads a tokenizer by path."""

from __future__ import annotations

from pathlib import Path

from ..formats import GGUFFile, find_gguf
from .gguf import gguf_chat_templates, load_gguf_tokenizer
from .hf import hf_chat_templates, load_hf_tokenizer
from .tokenizer import Tokenizer

__all__ = ["load_tokenizer", "read_chat_template"]


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer of the model at ``path``; None if it has none (prompts are then token ids)."""
    path = Path(path)
    gguf = find_gguf(path)
    return load_hf_tokenizer(path) if gguf is None else load_gguf_tokenizer(GGUFFile(gguf))


def read_chat_template(path: str | Path) -> str:
    """The text of the chat template of the model at ``path``, several joined; empty if there is none."""
    path = Path(path)
    if not path.exists():
        return ""
    gguf = find_gguf(path)
    return "\n".join((hf_chat_templates(path) if gguf is None else gguf_chat_templates(GGUFFile(gguf))).values())
