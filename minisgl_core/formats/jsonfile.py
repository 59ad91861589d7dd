"""JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .wrong_file import cause_of

__all__ = ["read_json"]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises :class:`~minisgl_core.errors.CheckpointError` naming the file and place."""
    cause = cause_of(path)
    if cause is not None:
        raise CheckpointError(f"{str(path)!r} {cause.problem}", field=path.name, value=str(path), remedy=cause.remedy)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{str(path)!r} is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}",
            field=path.name,
            value=str(path),
            remedy="fix or download the file again",
        ) from error
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, numbers of thousands of digits, deep nesting
        raise CheckpointError(
            f"{str(path)!r} cannot be read: {error}", field=path.name, value=str(path), remedy="check the file"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{str(path)!r} holds a {type(content).__name__}, not an object",
            field=path.name,
            value=str(path),
            remedy="fix or download the file again",
        )
    return content
