"""The file of a capsule: safetensors, with everything that is no tensor as JSON in the header."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from minisgl_core.errors import CheckpointError, UsageError

__all__ = ["FORMAT", "read_file", "unreadable", "write_file"]

FORMAT: Final = 1
_KEY: Final = "minisgl.capsule"


def write_file(path: Path, header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the file completely or not at all. Raises :class:`UsageError` if the folder cannot be written."""
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    text = json.dumps({"format": FORMAT, **header})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            pass
        save_file(plain, file.name, metadata={_KEY: text})
        os.chmod(file.name, 0o644)
        Path(file.name).replace(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"capsule {str(path)!r} cannot be written: {error}",
            field="record",
            value=str(path),
            remedy="name a folder that can be written and has free space",
        ) from error


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return (header, tensors).

    Raises :class:`UsageError` for a path without a file, :class:`CheckpointError` for a file that
    is not a capsule.
    """
    if not path.is_file():
        raise UsageError(
            f"there is no capsule {str(path)!r}",
            field="FILE",
            value=str(path),
            remedy="record one: minisgl generate --record DIR",
        )
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(_KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
    except (OSError, SafetensorError, ValueError) as error:
        raise unreadable(path, f"cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise unreadable(path, "is a safetensors file, but not a capsule")
    return header, tensors


def unreadable(path: Path, what: str) -> CheckpointError:
    """The error for a file that is not a readable capsule."""
    return CheckpointError(f"capsule {str(path)!r} {what}", field="FILE", value=str(path), remedy="record it again")
