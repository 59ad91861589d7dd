"""The header of a GGUF file: metadata and where each tensor lies. Read once, in one pass, without torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Tensor bytes stay in the file (memory-mapped);
turning them into numbers is the business of :mod:`minisgl_core.checkpoint`.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError, UsageError

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
"""Value type id -> how its bytes read."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of the file. ``shape`` is in torch's order (GGUF lists the fastest dimension first)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    """ggml's number of the format, such as 0 = F32, 3 = Q4_1."""
    start: int
    """Offset of its first byte from the beginning of the file."""


class GGUFFile:
    """``metadata``: key -> int, float, bool, str or list; ``tensors``: name -> :class:`GGUFTensor`.

    Raises :class:`~minisgl_core.errors.CheckpointError` naming the file if it is not a little-endian GGUF of version 2
    or 3, or ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._parse(data)
        except (struct.error, ValueError, OSError) as error:
            raise self._error(f"cannot be read: {error}", "download it again") from error

    def require(self, key: str) -> Any:
        """A metadata value that must be there."""
        if key not in self.metadata:
            raise self._error(f"has no metadata key `{key}`", "convert the model again with a current converter")
        return self.metadata[key]

    @property
    def architecture(self) -> str:
        """Such as ``llama`` or ``qwen3moe``."""
        return str(self.require("general.architecture"))

    def _error(self, problem: str, remedy: str) -> CheckpointError:
        return CheckpointError(
            f"GGUF file {str(self.path)!r} {problem}", field="model", value=str(self.path), remedy=remedy
        )

    def _parse(self, data: mmap.mmap) -> None:
        if data[:4] != _MAGIC:
            raise self._error(f"begins with {bytes(data[:4])!r}, not {_MAGIC!r}", "give a GGUF file")
        version, num_tensors, num_keys = struct.unpack_from("<IQQ", data, 4)
        if version not in _VERSIONS:
            raise self._error(f"has version {version}, minisgl reads {_VERSIONS}", "convert the model again")
        cursor = _Cursor(data, 24)
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.number(4))
        found = [self._tensor_info(cursor) for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        base = -(-cursor.offset // alignment) * alignment
        for name, shape, type_id, offset in found:
            self.tensors[name] = GGUFTensor(name, shape, type_id, base + offset)

    @staticmethod
    def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        dims = [cursor.number(10) for _ in range(cursor.number(4))]
        return name, tuple(reversed(dims)), cursor.number(4), cursor.number(10)


class _Cursor:
    """Reads values one after another from mapped bytes."""

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
        layout = struct.Struct(f"<{length}{_SCALARS[item_type].format[1:]}")
        values = layout.unpack_from(self._data, self.offset)
        self.offset += layout.size
        return list(values)


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that ``path`` stands for: the file itself, or the only one in a folder without config.json.

    None if the folder is a Hugging Face one. Raises :class:`~minisgl_core.errors.UsageError` if nothing is there, and
    :class:`~minisgl_core.errors.CheckpointError` if there are several to choose from.
    """
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise UsageError(
            f"model file {str(path)!r} is not a GGUF file",
            field="model",
            value=str(path),
            remedy="give a .gguf file or the folder that holds config.json",
        )
    if not path.is_dir():
        raise UsageError(
            f"there is no model folder or file at {str(path)!r}",
            field="model",
            value=str(path),
            remedy="check the path",
        )
    if (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise CheckpointError(
            f"model folder {str(path)!r} holds {len(found)} GGUF files: {', '.join(file.name for file in found)}",
            field="model",
            value=str(path),
            remedy="name one of the files",
        )
    return found[0] if found else None
