"""The header of a GGUF file: metadata, and where each tensor is. It is read in one pass, without torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Tensor data stays in the memory-mapped file;
:mod:`minisgl_core.checkpoint` converts it to numbers.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError, UsageError
from .gguf_parts import check_part, check_whole, part_of, parts_of, split_count
from .wrong_file import cause_of

__all__ = ["GGUFFile", "GGUFTensor", "find_gguf"]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_STRING, _ARRAY = 8, 9
_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
"""Value type id -> its layout for :mod:`struct`."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of the file. ``shape`` is in torch's order (GGUF lists the fastest dimension first)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    """ggml's id of the format, such as 0 = F32, 3 = Q4_1."""
    start: int
    """Offset of its first byte from the beginning of the file."""
    path: Path
    """The file that contains it: one of several if the model is split."""


class GGUFFile:
    """The headers of one model.

    ``metadata``: key -> int, float, bool, str or list. ``tensors``: name -> :class:`GGUFTensor`. For a split model,
    opened by any of its parts, this is the metadata of the first part and the tensors of all; ``paths`` are the files.

    Raises :class:`~minisgl_core.errors.CheckpointError` that names the file if it is not a little-endian GGUF of
    version 2 or 3 or is truncated, and for parts that are missing or do not belong together.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, self.tensors = _read(path)
        count = split_count(path, self.metadata)
        self.paths = parts_of(path, count) if count > 1 else [path]
        if count > 1:
            self._join()

    def _join(self) -> None:
        self.path = self.paths[0]
        headers = [_read(path) for path in self.paths]
        self.metadata = headers[0][0]
        self.tensors, twice = {}, []
        for number, (path, (metadata, tensors)) in enumerate(zip(self.paths, headers, strict=True)):
            check_part(path, metadata, number, self.metadata)
            twice += sorted(self.tensors.keys() & tensors.keys())
            self.tensors |= tensors
        check_whole(self.path, self.metadata, len(self.tensors), twice)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(path.stat().st_size for path in self.paths)

    def require(self, key: str) -> Any:
        """A required metadata value."""
        if key not in self.metadata:
            raise self._error(f"has no metadata key `{key}`", "convert the model again with a current converter")
        return self.metadata[key]

    @property
    def architecture(self) -> str:
        """Such as ``llama`` or ``qwen3moe``."""
        return str(self.require("general.architecture"))

    def _error(self, problem: str, remedy: str) -> CheckpointError:
        return _error(self.path, problem, remedy)


def _error(path: Path, problem: str, remedy: str) -> CheckpointError:
    return CheckpointError(f"GGUF file {str(path)!r} {problem}", field="model", value=str(path), remedy=remedy)


_Header = tuple[dict[str, Any], dict[str, GGUFTensor]]


def _read(path: Path) -> _Header:
    """(metadata, tensors) of one file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (struct.error, ValueError, OSError) as error:
        cause = cause_of(path)
        if cause is not None and not _begins(path):
            raise _error(path, cause.problem, cause.remedy) from error
        cut = "the file ends inside its header" if isinstance(error, struct.error) else error
        raise _error(path, f"cannot be read: {cut}", "download it again") from error


def _begins(path: Path) -> bool:
    """True if the first bytes are those of a GGUF file."""
    if path.is_dir():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _parse(path: Path, data: mmap.mmap) -> _Header:
    if data[:4] != _MAGIC:
        raise ValueError(f"it begins with {bytes(data[:4])!r}, not {_MAGIC!r}")
    version, num_tensors, num_keys = struct.unpack_from("<IQQ", data, 4)
    if version not in _VERSIONS:
        swapped = version > 0xFFFF  # the number of a big-endian file, read from the wrong end
        found = "is big-endian" if swapped else f"has version {version}"
        raise _error(path, f"{found}, minisgl reads little-endian {_VERSIONS}", "convert the model again")
    metadata: dict[str, Any] = {}
    cursor = _Cursor(data, 24)
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number(4))
    found_tensors = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"`general.alignment` is {alignment!r:.80}")
    base = -(-cursor.offset // alignment) * alignment
    return metadata, {
        name: GGUFTensor(name, shape, type_id, base + offset, path) for name, shape, type_id, offset in found_tensors
    }


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dims = [cursor.number(10) for _ in range(cursor.number(4))]
    return name, tuple(reversed(dims)), cursor.number(4), cursor.number(10)


class _Cursor:
    """Reads values in sequence from mapped bytes."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self._data = data
        self.offset = offset

    def number(self, type_id: int) -> Any:
        layout = _SCALARS[type_id]
        (value,) = layout.unpack_from(self._data, self.offset)
        self.offset += layout.size
        return value

    def string(self) -> str:
        start = self.offset + 8
        (length,) = struct.unpack_from("<Q", self._data, self.offset)
        if start + length > len(self._data):
            raise ValueError("it ends inside a string")
        self.offset = start + length
        return self._data[start : self.offset].decode("utf-8", errors="replace")

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            if type_id not in _SCALARS:
                raise ValueError(f"unknown value type {type_id}")
            return self.number(type_id)
        item_type, length = self.number(4), self.number(10)
        if item_type not in _SCALARS:
            return [self.value(item_type) for _ in range(length)]
        if length > len(self._data):
            raise ValueError("it ends inside an array")
        layout = struct.Struct(f"<{length}{_SCALARS[item_type].format[1:]}")
        values = layout.unpack_from(self._data, self.offset)
        self.offset += layout.size
        return list(values)


def find_gguf(path: Path) -> Path | None:
    """Find the GGUF file at ``path``: the file itself, or the only model in a folder without config.json (the first
    part of a split model).

    Returns None if the folder is a Hugging Face one. Raises :class:`~minisgl_core.errors.UsageError` if the path does
    not exist, and :class:`~minisgl_core.errors.CheckpointError` if there are several models.
    """
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        cause = cause_of(path)
        raise _no_model(
            f"model file {str(path)!r} {'is not a GGUF file' if cause is None else cause.problem}",
            path,
            "give a .gguf file or the folder that holds config.json",
        )
    if not path.is_dir():
        raise _no_model(f"there is no model folder or file at {str(path)!r}", path, "check the path")
    if (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    models = {(part.stem, part.total) if (part := part_of(file)) else file.name: file for file in reversed(found)}
    if len(models) > 1:
        raise CheckpointError(
            f"model folder {str(path)!r} holds {len(models)} GGUF models: {', '.join(file.name for file in found)}",
            field="model",
            value=str(path),
            remedy="name one of the files",
        )
    return found[0] if found else None


def _no_model(message: str, path: Path, remedy: str) -> UsageError:
    return UsageError(message, field="model", value=str(path), remedy=remedy)
