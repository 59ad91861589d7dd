"""A file that is not what its name says: the error names the cause, not what the parser met."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl_core.checkpoint import open_source
from minisgl_core.errors import MinisglError
from minisgl_core.modelconfig import read_model_config
from support.model_configs import LLAMA

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 538090408\n"
WRONG = {
    "lfs": (LFS, "is a Git LFS pointer.*; run `git lfs pull`"),
    "empty": (b"", "is empty: a download that never began"),
    "html": (b"\n<!DOCTYPE html><html><head>", "is a web page, not the file"),
    "html2": (b"<HTML><body>403", "is a web page, not the file"),
    "xml": (b"<?xml version='1.0'?><Error>", "is an XML answer of a server"),
    "error": (b'{"error":"Access to model is restricted"}', "is the error message of a server"),
    "zeros": (bytes(4096), "holds zeros: a download that reserved its space"),
}


def folder(tmp_path: Path, **files: bytes) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for name, content in files.items():
        (tmp_path / name.replace("__", ".")).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("kind", WRONG)
def test_safetensors_that_are_something_else(kind: str, tmp_path: Path) -> None:
    content, message = WRONG[kind]
    with pytest.raises(MinisglError, match=rf"model\.safetensors' {message}"):
        open_source(folder(tmp_path, model__safetensors=content))


@pytest.mark.parametrize("kind", WRONG)
def test_a_gguf_that_is_something_else(kind: str, tmp_path: Path) -> None:
    content, message = WRONG[kind]
    (tmp_path / "m.gguf").write_bytes(content)
    for path in (tmp_path, tmp_path / "m.gguf"):
        for read in (read_model_config, open_source):
            with pytest.raises(MinisglError, match=rf"m\.gguf' {message}"):
                read(path)


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_is_something_else(name: str, kind: str, tmp_path: Path) -> None:
    content, message = WRONG[kind]
    path = folder(tmp_path)
    (path / name).write_bytes(content)
    with pytest.raises(MinisglError, match=rf"{name}' {message}"):
        read_model_config(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + bytes(60), "is a zip archive, such as PyTorch's own format; give safetensors or GGUF"),
        (b"\x80\x02}q\x00" + bytes(60), "is a Python pickle"),
        (b"\x1f\x8b\x08" + bytes(60), "is compressed with gzip; unpack it"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "is a GGUF file; name it .gguf"),
    ],
)
def test_weights_of_another_format(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(MinisglError, match=message):
        open_source(folder(tmp_path, model__safetensors=content))


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (4, "ends inside its header, after 4 bytes; the download was cut: download it again"),
        (30, "ends inside its header, after 30 bytes"),
        (-7, r"has \d+ bytes, and its header says \d+; download it again"),
    ],
)
def test_cut_safetensors(kept: int, message: str, tmp_path: Path) -> None:
    path = folder(tmp_path) / "model.safetensors"
    save_file({"a": torch.ones(10)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(MinisglError, match=message):
        open_source(tmp_path)


def test_more_bytes_than_the_header_says(tmp_path: Path) -> None:
    path = folder(tmp_path) / "model.safetensors"
    save_file({"a": torch.ones(10)}, path)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(MinisglError, match=r"has \d+ bytes, and its header says \d+"):
        open_source(tmp_path)


def test_a_folder_named_like_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").mkdir()
    with pytest.raises(MinisglError, match=r"m\.gguf' is a folder, not a file; give the file in it"):
        read_model_config(tmp_path)


def test_a_folder_named_like_a_weight_file(tmp_path: Path) -> None:
    (folder(tmp_path) / "model.safetensors").mkdir()
    with pytest.raises(MinisglError, match=r"model\.safetensors' is a folder, not a file"):
        open_source(tmp_path)


def test_a_model_file_that_is_a_pointer(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(LFS)
    with pytest.raises(MinisglError, match="model' is a Git LFS pointer"):
        read_model_config(tmp_path / "model")
