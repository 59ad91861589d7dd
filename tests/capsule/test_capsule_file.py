"""The file: a capsule comes back as it was, and other files are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from minisgl_core.capsule.format import load_capsule
from minisgl_core.capsule.replay import check_capsule
from minisgl_core.errors import CheckpointError, UsageError


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_capsule_comes_back_as_it_was(make_capsule: Any, tmp_path: Path, dtype: str) -> None:
    capsule = make_capsule("prefill", ((3, 9), (5, 5)), dtype=dtype)
    capsule.save(tmp_path / "new" / "x.safetensors")
    again = load_capsule(tmp_path / "new" / "x.safetensors")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.safetensors"], "no half-written file stays"
    for name in ("step", "phase", "geometry", "q_lens", "kv_lens", "uids", "origin"):
        assert getattr(again, name) == getattr(capsule, name)
    assert torch.equal(again.page_ids, capsule.page_ids) and torch.equal(again.out_loc, capsule.out_loc)
    for mine, theirs in zip(again.layers, capsule.layers, strict=True):
        assert (mine.layer_id, mine.facts) == (theirs.layer_id, theirs.facts)
        for name in ("q", "k", "v", "out", "k_pages", "v_pages"):
            torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), rtol=0, atol=0, equal_nan=True)
    assert again.summary() == capsule.summary()
    assert again.summary().startswith("step 7, prefill, 2 rows of 9, 5 tokens (8 new), 2 layers, ")


def test_files_of_format_1_stay_readable(make_capsule: Any, tmp_path: Path) -> None:
    """Written here as the first version did, name by name."""
    layer = {"layer_id": 3, "scale": 0.5, "window": None, "softcap": 2.0}
    geometry = {"dtype": "float32", "kv_dtype": "float32", "kv_layout": "NHD", "page_size": 2, "q_heads": 2}
    geometry |= {"kv_heads": 1, "head_dim": 4, "max_batch": 1, "max_tokens": 8, "max_seq_len": 16}
    header = {"format": 1, "role": "attention", "step": 5, "phase": "decode", "geometry": geometry, "q_lens": [1]}
    header |= {"kv_lens": [2], "uids": [9], "layers": [layer], "origin": {"backend": "x"}}
    tensors = {"page_ids": torch.zeros(1, 1), "positions": torch.ones(1), "out_loc": torch.ones(1)}
    tensors = {name: tensor.to(torch.int32) for name, tensor in tensors.items()}
    tensors |= {"q.0": torch.ones(1, 2, 4), "k.0": torch.ones(1, 1, 4), "v.0": torch.ones(1, 1, 4)}
    tensors |= {"out.0": torch.ones(1, 2, 4)}
    tensors |= {"k_pages.0": torch.ones(2, 2, 1, 4), "v_pages.0": torch.ones(2, 2, 1, 4)}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"minisgl.capsule": json.dumps(header)})
    assert load_capsule(path).summary().startswith("step 5, decode, 1 row of 2 tokens (1 new), 1 layer, ")
    check_capsule(path, "attention:torch", device="cpu")
    made = make_capsule()
    made.save(path)
    with safe_open(path, "pt") as file:
        written = json.loads(file.metadata()["minisgl.capsule"])
    assert (written.keys(), written["layers"][0].keys()) == (header.keys(), layer.keys())
    assert written["geometry"].keys() - geometry.keys() == {"batches_in_flight"}


def test_a_path_without_a_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no capsule .*nothing'; record one: minisgl generate --record DIR"):
        load_capsule(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "cannot be read"),
        (b"not a capsule at all", "cannot be read"),
        (b"\xff" * 64, "cannot be read"),
    ],
)
def test_a_file_of_something_else_is_named(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(text)
    with pytest.raises(CheckpointError, match=message):
        load_capsule(path)


def test_other_safetensors_and_other_formats_are_no_capsules(make_capsule: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="is a safetensors file, but not a capsule"):
        load_capsule(path)
    save_file({"a": torch.zeros(1)}, path, metadata={"minisgl.capsule": json.dumps({"role": "moe", "format": 9})})
    with pytest.raises(CheckpointError, match=r"holds 'moe', format 9; this version reads attention and moe, format 1"):
        load_capsule(path)


def test_a_missing_tensor_is_named(make_capsule: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    make_capsule().save(path)
    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    del tensors["v_pages.1"]
    save_file(tensors, path, metadata=header)
    with pytest.raises(CheckpointError, match=r"is incomplete: KeyError: 'v_pages\.1'"):
        load_capsule(path)


def test_a_folder_that_cannot_be_made_is_an_error_and_leaves_nothing(make_capsule: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        make_capsule().save(tmp_path / "file" / "x.safetensors")


def test_sizes_are_those_of_the_tensors(make_capsule: Any) -> None:
    capsule = make_capsule("decode", ((1, 4),), page_size=4, kv_heads=1)
    # per layer: q and out 2 heads, k and v 1 head of 1 token, 2 pages (one is the dummy) of k and of v; 8 floats a head
    per_layer = 4 * 8 * (2 + 2 + 1 + 1 + 2 * 2 * 4)
    assert capsule.nbytes == 2 * per_layer + 4 * (1 + 1 + 1)
    assert replace(capsule, layers=capsule.layers[:1]).nbytes == per_layer + 12
