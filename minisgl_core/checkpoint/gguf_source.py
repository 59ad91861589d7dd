"""Weights of a GGUF file, under Hugging Face names and in Hugging Face's row order, dequantised by ``gguf``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
import torch

from ..errors import CheckpointError
from ..formats import GGUFFile, GGUFTensor

__all__ = ["GGUFSource"]

_TOP: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_OF_EXPERTS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_NOT_WEIGHTS: Final = frozenset({"rope_freqs.weight"})
"""Tensors that are read as part of the model's config."""
_LAYER_NAME: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TORCH_DTYPES: Final = {
    0: torch.float32,
    1: torch.float16,
    24: torch.int8,
    25: torch.int16,
    26: torch.int32,
    27: torch.int64,
    28: torch.float64,
    30: torch.bfloat16,
}
"""ggml formats that torch supports directly."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Part:
    """The origin of a Hugging Face tensor: a GGUF tensor, or one expert of it."""

    tensor: GGUFTensor
    expert: int | None = None
    heads: int = 0
    """If not 0, the rows of each of this number of heads are stored as pairs for interleaved rope and must be
    reordered.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]


class GGUFSource:
    """A :class:`~minisgl_core.checkpoint.targets.WeightSource` over the memory-mapped GGUF files of one model.

    Only the requested rows are dequantised. Raises :class:`~minisgl_core.errors.CheckpointError` if the file is shorter
    than its header states, or the installed ``gguf`` library cannot dequantise the format of a tensor.
    """

    def __init__(self, path: Path) -> None:
        file = GGUFFile(path)
        self._parts = {name: part for tensor in file.tensors.values() for name, part in _parts(file, tensor)}
        sizes = {part: part.stat().st_size for part in file.paths}
        for part in self._parts.values():
            _check(part.tensor, sizes[part.tensor.path])
        self._bytes: dict[Path, Array] | None = {part: np.memmap(part, dtype=np.uint8, mode="r") for part in file.paths}

    def names(self) -> frozenset[str]:
        return frozenset(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._parts[name].shape

    def dtype(self, name: str) -> str:
        return str(_TORCH_DTYPES.get(self._parts[name].tensor.type_id, torch.float32)).removeprefix("torch.")

    def order(self, names: Iterable[str]) -> list[str]:
        """Tensor names in file order."""
        return sorted(names, key=self._place)

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        part = self._parts[name]
        rows = self._rows(part.tensor)
        if len(part.shape) == 1:
            values = _numbers(part.tensor.type_id, rows[0].copy())
            return values[_row_order(part)][index]
        if part.expert is not None:
            count = part.shape[0]
            rows = rows[part.expert * count : (part.expert + 1) * count]
        chosen = rows[_row_order(part)[index[0]] if index else _row_order(part)]
        return _numbers(part.tensor.type_id, chosen)[(slice(None), *index[1:])]

    def close(self) -> None:
        self._bytes = None

    def _place(self, name: str) -> tuple[Path, int, int]:
        part = self._parts[name]
        return part.tensor.path, part.tensor.start, part.expert or 0

    def _rows(self, tensor: GGUFTensor) -> Array:
        """The packed rows: (product of all dimensions but the last, bytes of one row)."""
        if self._bytes is None:
            raise ValueError("this GGUFSource is closed")
        packed = self._bytes[tensor.path][tensor.start : tensor.start + _num_bytes(tensor)]
        return packed.reshape(-1, _row_bytes(tensor))


def _check(tensor: GGUFTensor, size: int) -> None:
    known = {int(kind) for kind in gguf.GGMLQuantizationType}
    problem, remedy = "", "upgrade gguf, or use a file in another format"
    if tensor.type_id not in known:
        problem = f"has format {tensor.type_id}, which the installed gguf library does not know"
    elif not _is_readable(tensor.type_id):
        name = gguf.GGMLQuantizationType(tensor.type_id).name
        problem = f"has format {name}, which the installed gguf library cannot turn into numbers"
    elif tensor.start + _num_bytes(tensor) > size:
        problem = f"ends at byte {tensor.start + _num_bytes(tensor)}, the file at {size}"
        remedy = "the download was cut, or is still running: download the file again"
    if problem:
        raise CheckpointError(
            f"tensor {tensor.name!r} of GGUF file {str(tensor.path)!r} {problem}",
            field=tensor.name,
            value=str(tensor.path),
            remedy=remedy,
        )


def _parts(file: GGUFFile, tensor: GGUFTensor) -> list[tuple[str, _Part]]:
    """The Hugging Face tensors that one GGUF tensor contains. Unknown names are kept unchanged."""
    if tensor.name in _NOT_WEIGHTS:
        return []
    match = _LAYER_NAME.fullmatch(tensor.name)
    if match is None:
        return [(_TOP.get(tensor.name, tensor.name), _Part(tensor))]
    layer, kind, suffix = match.groups()
    prefix = f"model.layers.{layer}"
    if kind in _OF_EXPERTS:
        names = [f"{prefix}.mlp.experts.{expert}.{_OF_EXPERTS[kind]}.weight" for expert in range(tensor.shape[0])]
        return [(name, _Part(tensor, expert)) for expert, name in enumerate(names)]
    if kind not in _IN_LAYER:
        return [(tensor.name, _Part(tensor))]
    return [(f"{prefix}.{_IN_LAYER[kind]}.{suffix}", _Part(tensor, heads=_permuted_heads(file, kind)))]


def _permuted_heads(file: GGUFFile, kind: str) -> int:
    """Number of heads whose rows are stored as pairs, 0 = none."""
    # Only the architecture ``llama`` pairs adjacent rows of q and k; the others keep the halves of a head apart.
    if file.architecture != "llama" or kind not in ("attn_q", "attn_k"):
        return 0
    heads = int(file.require("llama.attention.head_count"))
    return heads if kind == "attn_q" else int(file.metadata.get("llama.attention.head_count_kv", heads))


def _row_order(part: _Part) -> npt.NDArray[np.int64]:
    """Row of the file for each row in Hugging Face's order.

    Within a head of D rows, file row 2i is Hugging Face row i and file row 2i + 1 is row i + D/2.
    """
    order = np.arange(part.shape[0])
    return order.reshape(part.heads, -1, 2).swapaxes(1, 2).reshape(-1) if part.heads else order


@cache
def _is_readable(type_id: int) -> bool:
    """True if ``gguf`` can dequantise this format."""
    kind = gguf.GGMLQuantizationType(type_id)
    # The library has no query for this, so try it on a block of zeros.
    try:
        _numbers(type_id, np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8))
    except NotImplementedError:
        return False
    return True


def _row_bytes(tensor: GGUFTensor) -> int:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
    return tensor.shape[-1] // block * size


def _num_bytes(tensor: GGUFTensor) -> int:
    rows = 1
    for extent in tensor.shape[:-1]:
        rows *= extent
    return rows * _row_bytes(tensor)


def _numbers(type_id: int, packed: Array) -> torch.Tensor:
    """Convert packed rows (..., bytes), writable, to numbers (..., numbers).

    Quantised formats become float32, the others keep their dtype.
    """
    if type_id in _TORCH_DTYPES:
        return torch.from_numpy(packed).view(_TORCH_DTYPES[type_id])
    numbers = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType(type_id))
    return torch.from_numpy(numbers)
