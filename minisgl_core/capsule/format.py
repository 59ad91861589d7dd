"""Reads capsules of all roles. There is one file format so far, number 1."""

from __future__ import annotations

from pathlib import Path

from .base import Capsule
from .file import FORMAT, read_file, unreadable
from .roles import ROLES

__all__ = ["load_capsule"]


def load_capsule(path: str | Path) -> Capsule:
    """Read a capsule. Raises :class:`UsageError` for a path without a file, :class:`CheckpointError` for a file that is
    not a capsule, or one of another format or role.
    """
    path = Path(path)
    header, tensors = read_file(path)
    tools = ROLES.get(str(header.get("role")))
    if header.get("format") != FORMAT or tools is None:
        found = f"{header.get('role')!r}, format {header.get('format')!r}"
        raise unreadable(path, f"holds {found}; this version reads {' and '.join(ROLES)}, format {FORMAT}")
    try:
        return tools.capsule.of(header, tensors)
    except (KeyError, TypeError, IndexError) as error:
        raise unreadable(path, f"is incomplete: {type(error).__name__}: {error}") from error
