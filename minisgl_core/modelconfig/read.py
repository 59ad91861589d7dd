"""Reads a :class:`~minisgl_core.modelconfig.facts.ModelConfig` by path."""

from __future__ import annotations

from pathlib import Path

from ..formats import GGUFFile, find_gguf
from .facts import ModelConfig
from .gguf import read_gguf
from .hf import read_hf_folder

__all__ = ["read_model_config"]


def read_model_config(path: str | Path) -> ModelConfig:
    """The configuration of the model at ``path``: a folder with config.json, a .gguf file, or a folder with one.

    Imports neither torch nor transformers. Raises :class:`~minisgl_core.errors.UsageError` if the path does not exist,
    and :class:`~minisgl_core.errors.CheckpointError` if the model cannot be run faithfully.
    """
    path = Path(path)
    gguf = find_gguf(path)
    return read_hf_folder(path) if gguf is None else read_gguf(GGUFFile(gguf))
