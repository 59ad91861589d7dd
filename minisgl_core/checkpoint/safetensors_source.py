"""Weights of safetensors files: one file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from ..formats import Cause, cause_of, read_json

if TYPE_CHECKING:
    import torch

__all__ = ["SafetensorsSource", "open_safetensors"]

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_LONGEST_HEADER: Final = 100_000_000
"""The longest header that the safetensors library accepts."""
_DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of dtypes in torch; other dtypes keep the name of the format."""


def open_safetensors(folder: Path) -> SafetensorsSource | None:
    """Open the weights of a folder; None if it has no safetensors.

    If there is an index, only the files that it lists are read. Raises :class:`~minisgl_core.errors.CheckpointError`
    before any tensor is read if one of them is missing.
    """
    if (folder / INDEX).exists():
        return SafetensorsSource(_indexed_files(folder))
    if (folder / SINGLE).exists():
        return SafetensorsSource(_files_of(folder / SINGLE))
    found = sorted(folder.glob("*.safetensors"))
    if len(found) > 1:
        raise CheckpointError(
            f"model folder {str(folder)!r} holds {len(found)} safetensors files but no {INDEX}",
            field="model",
            value=str(folder),
            remedy="download the index too",
        )
    return SafetensorsSource(_files_of(found[0])) if found else None


def _indexed_files(folder: Path) -> dict[str, Path]:
    """Map each tensor name to its shard, from the index."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(
            f"{str(folder / INDEX)!r} has no `weight_map` of tensor names to file names",
            field="weight_map",
            value=weight_map,
            remedy="download the index again",
        )
    missing = [name for name in sorted(set(weight_map.values())) if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"model folder {str(folder)!r} lacks {', '.join(missing)}, which {INDEX} names",
            field="model",
            value=missing,
            remedy="download the missing files",
        )
    return {tensor: folder / name for tensor, name in weight_map.items()}


def _files_of(path: Path) -> dict[str, Path]:
    with _open(path) as file:
        return dict.fromkeys(file.keys(), path)


def _open(path: Path) -> Any:
    """Memory-map one file; safetensors validates its header and size."""
    # The library's errors describe its parser; the cause is searched in the file itself.
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        cause = cause_of(path) or _cut(path) or Cause(f"cannot be read: {error}", "download it again")
        raise CheckpointError(
            f"weight file {str(path)!r} {cause.problem}", field="model", value=str(path), remedy=cause.remedy
        ) from error


def _cut(path: Path) -> Cause | None:
    """The error for a file whose length differs from its header; None if the length is right."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little") + 8
        header = file.read(length - 8) if length <= size else b""
    if length > _LONGEST_HEADER:
        return Cause(f"is not a safetensors file: it begins with {start!r}", "download it again")
    if len(start) < 8 or length > size:
        return Cause(f"ends inside its header, after {size} bytes", "the download was cut: download it again")
    try:
        ends = [item["data_offsets"][1] for name, item in json.loads(header).items() if name != "__metadata__"]
        wanted = length + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # the header is damaged, so its length is no evidence
    return None if wanted == size else Cause(f"has {size} bytes, and its header says {wanted}", "download it again")


class SafetensorsSource:
    """A :class:`~minisgl_core.checkpoint.targets.WeightSource` over memory-mapped files, one of them open at a time."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)
        self._path: Path | None = None
        self._file: Any = None

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        stored = str(self._slice(name).get_dtype())
        return _DTYPES.get(stored, stored)

    def order(self, names: Iterable[str]) -> list[str]:
        """Tensor names file by file, sorted by name within a file."""
        return sorted(names, key=lambda name: (self._files[name], name))

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        part: torch.Tensor = self._slice(name)[index] if index else self._file_of(name).get_tensor(name)
        return part

    def close(self) -> None:
        self._path = self._file = None  # safetensors unmaps when the last reference goes

    def _slice(self, name: str) -> Any:
        try:
            return self._file_of(name).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"tensor {name!r} is not in {str(self._files[name])!r}, though the index says so",
                field=name,
                value=str(self._files[name]),
                remedy="download the model again",
            ) from error

    def _file_of(self, name: str) -> Any:
        path = self._files[name]
        if path != self._path:
            self._file, self._path = _open(path), path
        return self._file
