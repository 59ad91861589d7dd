"""Loads a tokenizer by path."""

from __future__ import annotations

from pathlib import Path

from ..formats import GGUFFile, find_gguf
from .gguf import load_gguf_tokenizer
from .hf import load_hf_tokenizer
from .tokenizer import Tokenizer

__all__ = ["load_tokenizer"]


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer of the model at ``path``; None if it has none (prompts are then token ids)."""
    path = Path(path)
    gguf = find_gguf(path)
    return load_hf_tokenizer(path) if gguf is None else load_gguf_tokenizer(GGUFFile(gguf))
