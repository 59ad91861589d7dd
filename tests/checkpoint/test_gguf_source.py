from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from minisgl_core.checkpoint import open_source
from minisgl_core.errors import CheckpointError
from minisgl_core.formats import GGUFFile
from minisgl_core.modelconfig import read_model_config

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def write(path: Path, arch: str = "qwen2", kind: str = "F32", **tensors: np.ndarray) -> Path:
    """A GGUF file with these float32 tensors (two underscores mean a dot), quantised to ``kind``."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_head_count(2)
    for name, values in tensors.items():
        quantised = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(np.asarray(values, dtype=np.float32), quantised)
        writer.add_tensor(name.replace("__", "."), data, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def whole(source: Any, name: str) -> torch.Tensor:
    tensor = source.read(name, tuple(slice(None) for _ in source.shape(name)))
    assert isinstance(tensor, torch.Tensor)
    return tensor


@pytest.mark.parametrize("name", ["s93", "moe"])
def test_every_tensor_equals_the_hf_folders(name: str, tiny: Any) -> None:
    """s93: arch llama, whose q and k rows are interleaved in the file. moe: experts stacked in one tensor."""
    source, plain = open_source(tiny(f"{name}-gguf")), load_file(tiny(name) / "model.safetensors")
    assert source.names() == plain.keys()
    for key, tensor in plain.items():
        assert source.shape(key) == tuple(tensor.shape), key
        assert whole(source, key).equal(tensor), key


def test_slices_of_permuted_rows(tiny: Any) -> None:
    source, plain = open_source(tiny("s93-gguf")), load_file(tiny("s93") / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    for part in [(slice(64, 128), slice(None)), (slice(10, 50), slice(100, 200))]:
        assert source.read(name, part).equal(plain[name][part])


def test_biases_of_permuted_rows_are_permuted_as_well(tmp_path: Path) -> None:
    """Heads of four: file rows 0 1 2 3 of a head are rows 0 2 1 3 of Hugging Face, in q and k and nowhere else."""
    of_file = {
        f"blk__0__attn_{which}__bias": np.array([0, 2, 1, 3, 4, 6, 5, 7], dtype=np.float32) for which in ("q", "k", "v")
    }
    source = open_source(write(tmp_path / "m.gguf", arch="llama", **of_file))
    for which in ("q", "k"):
        name = f"model.layers.0.self_attn.{which}_proj.bias"
        assert whole(source, name).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
        assert source.read(name, (slice(3, 6),)).tolist() == [3, 4, 5]
    assert whole(source, "model.layers.0.self_attn.v_proj.bias").tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    other = open_source(write(tmp_path / "qwen2.gguf", arch="qwen2", **of_file))
    assert whole(other, "model.layers.0.self_attn.q_proj.bias").tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("kind", QUANTISED)
def test_dequantised_as_the_gguf_library_does(tmp_path: Path, kind: str) -> None:
    values = np.random.RandomState(0).standard_normal((12, 64)).astype(np.float32)
    path = write(tmp_path / "m.gguf", kind=kind, blk__0__ffn_up__weight=values, output__weight=values[:6])
    (tensor,) = (tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.ffn_up.weight")
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
    source = open_source(path)
    assert whole(source, "model.layers.0.mlp.up_proj.weight").equal(expected)
    part = (slice(3, 7), slice(5, 40))
    assert source.read("model.layers.0.mlp.up_proj.weight", part).equal(expected[part])
    assert source.read("lm_head.weight", (slice(0, 1), slice(None))).equal(expected[:1])


def test_half_precision_stays_what_it_is(tmp_path: Path) -> None:
    values = np.linspace(-2, 2, 64, dtype=np.float32).reshape(2, 32)
    for kind, dtype in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        read = whole(open_source(write(tmp_path / f"{kind}.gguf", kind=kind, output__weight=values)), "lm_head.weight")
        assert read.dtype == dtype
        assert read.equal(torch.from_numpy(values).to(dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "int16", "int32", "int64"])
def test_dtypes_that_torch_has_stay_what_they_are(dtype: str, tmp_path: Path) -> None:
    values = np.arange(64).reshape(2, 32).astype(dtype)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_tensor("output.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_source(tmp_path / "m.gguf")
    assert source.dtype("lm_head.weight") == dtype
    assert whole(source, "lm_head.weight").equal(torch.from_numpy(values))


@pytest.mark.parametrize(("kind", "dtype"), [("Q4_0", "float32"), ("BF16", "bfloat16")])
def test_dtypes_of_formats_that_are_converted(kind: str, dtype: str, tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "m.gguf", kind=kind, output__weight=np.ones((2, 32))))
    assert source.dtype("lm_head.weight") == dtype == str(whole(source, "lm_head.weight").dtype).removeprefix("torch.")


def test_a_format_that_gguf_cannot_convert_names_the_tensor(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    q8_k = gguf.GGMLQuantizationType.Q8_K
    writer.add_tensor("output.weight", np.zeros((1, gguf.GGML_QUANT_SIZES[q8_k][1]), dtype=np.uint8), raw_dtype=q8_k)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"tensor 'output.weight' .* has format Q8_K, which .* cannot turn into"):
        open_source(tmp_path / "m.gguf")


def test_unknown_tensors_keep_their_names(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", mtp__proj=np.ones((2, 32)), blk__0__odd__weight=np.ones((2, 32)))
    assert open_source(path).names() == {"mtp.proj", "blk.0.odd.weight"}


def test_rope_divisors_belong_to_the_config(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.ones((16, 8), np.float32))
    writer.add_tensor("rope_freqs.weight", np.array([1.0, 8.0], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert open_source(path).names() == {"model.embed_tokens.weight"}
    config = read_model_config(path)
    assert config.rope.divisors == (1.0, 8.0)
    assert (config.vocab_size, config.rms_norm_eps, config.tie_word_embeddings) == (16, 1e-5, True)


def test_metadata_equals_the_gguf_librarys(tiny: Any) -> None:
    path = tiny("moe-gguf") / "model.gguf"
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert {tensor.name: tensor.data_offset for tensor in theirs.tensors} == {
        name: tensor.start for name, tensor in ours.tensors.items()
    }


def test_a_cut_file_names_the_tensor(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", output__weight=np.ones((64, 64)))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"tensor 'output.weight' of GGUF file .* ends at byte \d+, the file at"):
        open_source(path)


def test_a_cut_header(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", output__weight=np.ones((64, 64)))
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_source(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + bytes(60), "is a zip archive, such as PyTorch's own format"),
        (b"PQ" + bytes(60), r"begins with b'PQ\\x00\\x00', not b'GGUF'"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(40), "is big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(40), "has version 1"),
        (b"", "is empty: a download that never began"),
    ],
)
def test_files_that_are_no_gguf(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_source(path)


def test_an_architecture_that_is_not_supported(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", arch="gemma3", output__weight=np.ones((2, 32)))
    with pytest.raises(CheckpointError, match=r"`general.architecture` = 'gemma3'; minisgl reads llama"):
        read_model_config(path)


def test_a_metadata_key_that_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", arch="llama", output__weight=np.ones((2, 32)))
    with pytest.raises(CheckpointError, match=r"has no metadata key `llama\.embedding_length`"):
        read_model_config(path)
