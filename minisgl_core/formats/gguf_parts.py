"""Models that are split into several GGUF files, ``NAME-00001-of-00003.gguf``.

The first part has all metadata; each part has ``split.no`` (from 0), ``split.count`` and ``split.tensors.count``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import CheckpointError

__all__ = ["Part", "check_part", "check_whole", "part_of", "parts_of", "split_count"]

_NAME: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS: Final = 99_999


class Part(NamedTuple):
    """The part that a file name denotes: ``number`` (from 1) of ``total``."""

    stem: str
    number: int
    total: int


def part_of(path: Path) -> Part | None:
    """Parse a file name; None if it is not that of a part."""
    match = _NAME.fullmatch(path.name)
    return Part(match[1], int(match[2]), int(match[3])) if match else None


def parts_of(path: Path, count: int) -> list[Path]:
    """All files of a split model, given any of them.

    Raises :class:`~minisgl_core.errors.CheckpointError` if the name is not that of a part, and for missing files, with
    their names.
    """
    part = part_of(path)
    if part is None or part.total != count:
        raise _error(
            path,
            f"is one of {count} parts, and its name does not end in -0000N-of-{count:05d}.gguf",
            "give the parts their names again: they are found by them",
        )
    files = [path.with_name(f"{part.stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise _error(path, f"is one of {count} parts, of which {_listed(missing)} are missing", "download them too")
    return files


def split_count(path: Path, metadata: Mapping[str, Any]) -> int:
    """Number of files of the model; 1 = not split."""
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= _MOST_PARTS:
        raise _error(path, f"has `split.count` = {count!r:.80}", "split the model again")
    return max(count, 1)


def check_part(path: Path, metadata: Mapping[str, Any], number: int, first: Mapping[str, Any]) -> None:
    """Raise :class:`~minisgl_core.errors.CheckpointError` unless the file is part ``number``, from 0, of a model.

    ``first``: the metadata of its first part.
    """
    for key, wanted in (
        ("split.no", number),
        ("split.count", first.get("split.count")),
        ("split.tensors.count", first.get("split.tensors.count")),
        ("general.architecture", metadata.get("general.architecture") and first.get("general.architecture")),
    ):
        found = metadata.get(key)
        if found != wanted:
            raise _error(
                path,
                f"has `{key}` = {found!r:.80}, and part {number + 1} of this model must have {wanted!r:.80}",
                "the parts are of different models or were renamed: download them again",
            )


def check_whole(path: Path, metadata: Mapping[str, Any], num_tensors: int, twice: Sequence[str]) -> None:
    """Raise :class:`~minisgl_core.errors.CheckpointError` unless the parts have each tensor once."""
    wanted = metadata.get("split.tensors.count", num_tensors)
    if twice or wanted != num_tensors:
        what = f"{_listed(twice)} twice" if twice else f"{num_tensors} tensors where `split.tensors.count` is {wanted}"
        raise _error(path, f"and its other parts have {what}", "the parts are of different models: download them again")


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _error(path: Path, problem: str, remedy: str) -> CheckpointError:
    return CheckpointError(f"GGUF file {str(path)!r} {problem}", field=path.name, value=str(path), remedy=remedy)
