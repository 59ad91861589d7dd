from __future__ import annotations

import json
import resource
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_core.checkpoint import head_is_tied, open_source
from minisgl_core.errors import CheckpointError, UsageError

INDEX = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def folder(path: Path, **files: dict[str, torch.Tensor]) -> Path:
    """A model folder with safetensors files; two underscores in a name mean a dot."""
    (path / "config.json").write_text("{}")
    for name, tensors in files.items():
        save_file(tensors, path / f"{name.replace('__', '.')}.safetensors")
    return path


def index(path: Path, weight_map: dict[str, str]) -> Path:
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path


def whole(source: Any, name: str) -> torch.Tensor:
    tensor = source.read(name, tuple(slice(None) for _ in source.shape(name)))
    assert isinstance(tensor, torch.Tensor)
    return tensor


def test_single_file(tmp_path: Path) -> None:
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4)
    source = open_source(folder(tmp_path, model={"a": tensor, "scalar": torch.tensor(7.0)}))
    assert source.names() == {"a", "scalar"}
    assert source.shape("a") == (3, 4)
    assert source.read("scalar", ()).item() == 7.0
    assert whole(source, "a").equal(tensor)


def test_dtypes_in_torchs_words(tmp_path: Path) -> None:
    dtypes = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    dtypes += ("int64", "int32", "int16", "int8", "uint8", "bool")
    tensors = {name: torch.ones(2).to(getattr(torch, name)) for name in dtypes}
    source = open_source(folder(tmp_path, model=tensors))
    assert {name: source.dtype(name) for name in dtypes} == {name: name for name in dtypes}


def test_slices(tmp_path: Path) -> None:
    tensor = torch.arange(400, dtype=torch.float32).view(20, 20)
    source = open_source(folder(tmp_path, model={"a": tensor}))
    for part in [(slice(5, 9), slice(None)), (slice(None), slice(3, 7)), (slice(2, 4), slice(10, 20))]:
        assert source.read("a", part).equal(tensor[part])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_case_82_memory_grows_by_the_slice_only(tmp_path: Path) -> None:
    """A sparse file of 256 MiB: reading 1 MiB of rows must not bring in the rest."""
    rows, columns = 65536, 1024
    size = rows * columns * 4
    header = json.dumps({"a": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, size]}}).encode()
    with (folder(tmp_path) / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    source = open_source(tmp_path)
    before = resident_bytes()
    copy = torch.empty(256, columns)
    copy.copy_(source.read("a", (slice(1000, 1256), slice(None))))
    assert resident_bytes() - before < 32 << 20
    assert not copy.any()


def test_a_file_that_is_alone_may_have_any_name(tmp_path: Path) -> None:
    source = open_source(folder(tmp_path, weights={"a": torch.ones(2)}))
    assert source.names() == {"a"}


def test_several_files_without_index(tmp_path: Path) -> None:
    folder(tmp_path, one={"a": torch.ones(2)}, two={"b": torch.ones(2)})
    with pytest.raises(CheckpointError, match=f"2 safetensors files but no {INDEX}"):
        open_source(tmp_path)


def test_shards_are_read_file_by_file(tiny: Any) -> None:
    path = tiny("q3-sharded")
    source = open_source(path)
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    files = [weight_map[name] for name in source.order(source.names())]
    assert files == sorted(files)
    assert len(set(files)) > 3
    plain = load_file(tiny("q3") / "model.safetensors")
    assert source.names() == plain.keys()
    for name, tensor in plain.items():
        assert whole(source, name).equal(tensor), name


def test_case_78_a_missing_shard_is_named_before_anything_is_read(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny("q3-sharded"), path)
    (path / "model-00003-of-00011.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00003-of-00011\.safetensors"):
        open_source(path)


def test_case_79_the_index_wins_over_stray_files(tmp_path: Path) -> None:
    stale = {"a": torch.zeros(2), "b": torch.zeros(2), "old": torch.zeros(2)}
    fresh = {"model-00001-of-00002": {"a": torch.ones(2)}, "model-00002-of-00002": {"b": torch.ones(2)}}
    folder(tmp_path, model=stale, consolidated=stale, **fresh)
    index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    source = open_source(tmp_path)
    assert source.names() == {"a", "b"}
    assert whole(source, "a").equal(torch.ones(2))
    assert whole(source, "b").equal(torch.ones(2))


def test_a_model_file_wins_over_stray_files(tmp_path: Path) -> None:
    source = open_source(folder(tmp_path, model={"a": torch.ones(2)}, consolidated={"a": torch.zeros(2)}))
    assert whole(source, "a").equal(torch.ones(2))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth"])
def test_case_80_other_formats_only(tmp_path: Path, name: str) -> None:
    (folder(tmp_path) / name).touch()
    with pytest.raises(CheckpointError, match=rf"no safetensors found in .*, only {name}; .*save_pretrained"):
        open_source(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no safetensors found"):
        open_source(folder(tmp_path))


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model folder"):
        open_source(tmp_path / "gone")


def test_a_cut_file(tmp_path: Path) -> None:
    path = folder(tmp_path, model={"a": torch.ones(1000)}) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors' has 3972 bytes, and its header says 4072"
    ) as caught:
        open_source(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_index_that_lies(tmp_path: Path) -> None:
    index(folder(tmp_path, model={"a": torch.ones(2)}), {"a": "model.safetensors", "b": "model.safetensors"})
    with pytest.raises(CheckpointError, match=r"'b' is not in .*though the index says so"):
        open_source(tmp_path).shape("b")


def test_an_index_without_a_map(tmp_path: Path) -> None:
    (folder(tmp_path) / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="no `weight_map`"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("tie", "head", "tied"),
    [
        (True, None, True),
        (False, None, True),
        (True, "equal", True),
        (False, "equal", False),
        (True, "different", False),
        (False, "different", False),
    ],
)
def test_case_77_tied_weights(tmp_path: Path, tie: bool, head: str | None, tied: bool) -> None:
    embedding = torch.arange(5000 * 2, dtype=torch.float32).view(5000, 2)
    tensors = {EMBEDDING: embedding}
    if head is not None:
        tensors[HEAD] = embedding.clone()
    if head == "different":
        tensors[HEAD][4999, 1] += 1
    assert head_is_tied(open_source(folder(tmp_path, model=tensors)), tie) is tied
