"""A model in several GGUF files: any part, or the folder, loads all of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from minisgl_core.checkpoint import open_source
from minisgl_core.errors import CheckpointError
from minisgl_core.formats import GGUFFile
from minisgl_core.modelconfig import read_model_config
from support.edited_gguf import read, split, write


@pytest.fixture(scope="module")
def parts(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return split(tiny("moe-gguf") / "model.gguf", tmp_path_factory.mktemp("split"), 3)


def test_any_part_and_the_folder_are_the_whole_model(parts: list[Path], tiny: Any) -> None:
    whole = open_source(tiny("moe-gguf"))
    for path in (*parts, parts[0].parent):
        assert read_model_config(path) == read_model_config(tiny("moe-gguf"))
        source = open_source(path)
        assert source.names() == whole.names()
        for name in source.order(source.names()):
            index = tuple(slice(None) for _ in whole.shape(name))
            assert source.read(name, index).equal(whole.read(name, index)), name
        source.close()


def test_tensors_are_read_file_by_file(parts: list[Path]) -> None:
    file, source = GGUFFile(parts[1]), open_source(parts[1])
    assert file.paths == parts
    assert file.num_bytes == sum(path.stat().st_size for path in parts)
    source_order = [source._parts[name].tensor.path for name in source.order(source.names())]  # type: ignore[attr-defined]
    assert source_order == sorted(source_order)


def edited(parts: list[Path], folder: Path) -> list[Path]:
    shutil.copytree(parts[0].parent, folder)
    return [folder / path.name for path in parts]


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_missing_part_is_named(gone: int, parts: list[Path], tmp_path: Path) -> None:
    mine = edited(parts, tmp_path / "m")
    mine[gone].unlink()
    for path in (*(path for path in mine if path.exists()), tmp_path / "m"):
        with pytest.raises(CheckpointError, match=rf"one of 3 parts, of which {mine[gone].name} are missing; download"):
            open_source(path)


def test_a_part_without_its_name(parts: list[Path], tmp_path: Path) -> None:
    mine = edited(parts, tmp_path / "m")
    other = mine[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match=r"its name does not end in -0000N-of-00003\.gguf; give the parts"):
        read_model_config(other)


def test_parts_that_changed_places(parts: list[Path], tmp_path: Path) -> None:
    mine = edited(parts, tmp_path / "m")
    shutil.copy(parts[1], mine[2])
    with pytest.raises(CheckpointError, match=r"00003-of-00003.* has `split\.no` = 1, and part 3 .* must have 2"):
        open_source(mine[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split.count": 4}, r"`split\.count` = 4, and part 2 of this model must have 3"),
        ({"split.tensors.count": 5}, r"`split\.tensors\.count` = 5"),
        ({"general.architecture": "qwen2"}, "`general.architecture` = 'qwen2', and part 2 .* must have 'qwen3moe'"),
    ],
)
def test_a_part_of_another_model(change: dict[str, Any], message: str, parts: list[Path], tmp_path: Path) -> None:
    mine = edited(parts, tmp_path / "m")
    metadata, tensors = read(mine[1])
    write(mine[1], {**metadata, **change}, tensors)
    with pytest.raises(CheckpointError, match=message):
        open_source(mine[0])


def test_a_tensor_too_few_or_twice(parts: list[Path], tmp_path: Path) -> None:
    mine = edited(parts, tmp_path / "m")
    metadata, tensors = read(mine[1])
    name = next(iter(tensors))
    write(mine[1], metadata, {key: values for key, values in tensors.items() if key != name})
    with pytest.raises(CheckpointError, match=r"have \d+ tensors where `split\.tensors\.count` is \d+"):
        open_source(mine[0])
    double = next(iter(read(mine[2])[1]))
    write(mine[1], metadata, {**tensors, double: np.ones(8, np.float32)})
    with pytest.raises(CheckpointError, match=f"have {double} twice"):
        open_source(mine[0])


@pytest.mark.parametrize("count", [-1, 100_000, "3", True])
def test_a_count_that_is_none(count: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"split.count": count}, {"output.weight": np.ones((2, 32), np.float32)})
    with pytest.raises(CheckpointError, match=r"`split\.count` = "):
        GGUFFile(path)


def test_a_folder_with_two_models_names_them(parts: list[Path], tiny: Any, tmp_path: Path) -> None:
    mine = edited(parts, tmp_path / "m")
    split(tiny("moe-gguf") / "model.gguf", tmp_path / "m", 2, stem="other")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models: model-00001-of-00003\.gguf, .*other-00002"):
        open_source(mine[0].parent)
    assert read_model_config(mine[0]).num_layers == 2


def test_data_begin_where_the_header_ends_if_that_is_aligned(tmp_path: Path) -> None:
    """One value among 32 successive lengths of a name makes the header end exactly at a multiple of 32."""
    values = np.arange(32, dtype=np.float32)
    for length in range(1, 33):
        path = write(tmp_path / "m.gguf", {"general.name": "x" * length}, {"output_norm.weight": values})
        (theirs,) = gguf.GGUFReader(path).tensors
        assert GGUFFile(path).tensors["output_norm.weight"].start == theirs.data_offset
        source = open_source(path)
        assert source.read("model.norm.weight", (slice(None),)).tolist() == values.tolist()
        source.close()
