"""Variations on a checkpoint: other config keys, other tensors, other files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = ["edited", "load_tensors"]

Tensors = dict[str, torch.Tensor]


def load_tensors(folder: Path) -> Tensors:
    """All tensors of a folder without shards."""
    return load_file(folder / "model.safetensors")


def edited(
    source: Path,
    target: Path,
    *,
    config: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    tensors: Callable[[Tensors], object] | None = None,
) -> Path:
    """A copy of ``source`` at ``target``. ``config`` and ``generation`` replace keys of their files, None removes one;
    ``tensors`` changes the dict of tensors in place.
    """
    shutil.copytree(source, target)
    for name, changes in (("config.json", config), ("generation_config.json", generation)):
        if changes:
            path = target / name
            content = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
            path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    if tensors is not None:
        held = load_tensors(target)
        tensors(held)
        save_file({key: value.contiguous() for key, value in held.items()}, target / "model.safetensors")
    return target
