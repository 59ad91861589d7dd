"""Variations on a GGUF file: other metadata, several parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

__all__ = ["copied", "read", "split", "write"]


def write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    packed: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """A GGUF file with these keys, in their order, and these tensors; ``packed``: the format of those not plain."""
    writer = gguf.GGUFWriter(path, str(metadata.get("general.architecture", "llama")))
    if "general.architecture" not in metadata:
        writer.kv_data[0].clear()
    for key, value in metadata.items():
        if key != "general.architecture" and value is not None:
            _add(writer, key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=(packed or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: list[tuple[type, Callable[[str, Any], None]]] = [
        (bool, writer.add_bool),
        (int, writer.add_int64),
        (float, writer.add_float32),
        (str, writer.add_string),
        (list, writer.add_array),
    ]
    next(add for kind, add in kinds if isinstance(value, kind))(key, value)


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return metadata, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


def copied(source: Path, target: Path, metadata: Mapping[str, Any]) -> Path:
    """A copy of a float file with other keys; None removes one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    own, tensors = read(source)
    return write(target, {**own, **metadata}, tensors)


def split(source: Path, folder: Path, count: int, stem: str = "model") -> list[Path]:
    """The same model in ``count`` parts: the first has all metadata, as the format's own tool writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata, tensors = read(source)
    names = list(tensors)
    parts = []
    for number in range(count):
        about = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        held = {name: tensors[name] for name in names[number::count]}
        path = folder / f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"
        parts.append(write(path, {**(metadata if number == 0 else {}), **about}, held))
    return parts
