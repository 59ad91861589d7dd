"""What a capsule holds, and its file: safetensors, with everything that is no tensor as JSON in the header.

Shapes: T tokens of the step, B rows, P the most pages of a row, N pages of the capsule (the dummy page is one more, at
index N), S page_size, H query heads, K kv heads, D head_dim. Heads are one rank's.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from minisgl_core.errors import CheckpointError, UsageError
from minisgl_core.plugin_api import LayerFacts, Phase

__all__ = ["FORMAT", "Capsule", "Geometry", "RecordedLayer", "load_capsule"]

FORMAT: Final = 1
_HEADER: Final = "minisgl.capsule"
_PER_LAYER: Final = ("q", "k", "v", "out", "k_pages", "v_pages")
_PER_STEP: Final = ("page_ids", "positions", "out_loc")


@dataclass(frozen=True, slots=True)
class Geometry:
    """What ``AttentionSetup`` said, as plain data. ``page_size`` is the pool's."""

    dtype: str
    kv_dtype: str
    kv_layout: str
    page_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_batch: int
    max_tokens: int
    max_seq_len: int
    batches_in_flight: int = 2


@dataclass(frozen=True, slots=True)
class RecordedLayer:
    """One layer's call. All tensors are on the host."""

    layer_id: int
    facts: LayerFacts
    q: torch.Tensor
    """(T, H, D)"""
    k: torch.Tensor
    """(T, K, D)"""
    v: torch.Tensor
    """(T, K, D)"""
    out: torch.Tensor
    """(T, H, D): what the backend of the time returned; NaN if it raised"""
    k_pages: torch.Tensor
    """(N + 1, S, K, D): the pages of this step's rows as they were before the call, and the dummy page"""
    v_pages: torch.Tensor
    """(N + 1, S, K, D)"""


@dataclass(frozen=True, slots=True)
class Capsule:
    """One step's attention: enough to run it again without the model, its weights, or the rest of the pool."""

    step: int
    phase: Phase
    geometry: Geometry
    q_lens: tuple[int, ...]
    """(B,) new tokens of each row, padded rows included"""
    kv_lens: tuple[int, ...]
    """(B,) tokens with KV, this pass's included"""
    uids: tuple[int, ...]
    """Of the requests, one for each real row; rows beyond them are padding"""
    page_ids: torch.Tensor
    """(B, P) int32, in the capsule's own numbering; entries past the live length are N"""
    positions: torch.Tensor
    """(T,) int32"""
    out_loc: torch.Tensor
    """(T,) int32 slots, in the capsule's own numbering"""
    layers: tuple[RecordedLayer, ...]
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Where it comes from: backend, versions, device, plan, and what made it be written."""

    @property
    def num_pages(self) -> int:
        """N"""
        return self.layers[0].k_pages.shape[0] - 1

    @property
    def real_tokens(self) -> int:
        """Tokens of the rows that are no padding; they come first."""
        return sum(self.q_lens[: len(self.uids)])

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def summary(self) -> str:
        """Such as ``step 12, prefill, 2 rows of 5, 17 tokens, 4 layers, 1.2 MB``."""
        real = len(self.uids)
        lens = ", ".join(map(str, self.kv_lens[: min(real, 6)])) + (", ..." if real > 6 else "")
        layers, rows = len(self.layers), f"{real} row{'s' * (real != 1)}"
        return (
            f"step {self.step}, {self.phase}, {rows} of {lens} tokens ({self.real_tokens} new), "
            f"{layers} layer{'s' * (layers != 1)}, {self.nbytes / 1e6:.3g} MB"
        )

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {name: getattr(self, name) for name in _PER_STEP}
        for place, layer in enumerate(self.layers):
            tensors |= {f"{name}.{place}": getattr(layer, name) for name in _PER_LAYER}
        return tensors

    def save(self, path: Path) -> None:
        """Write it, whole or not at all. Raises :class:`UsageError` if the folder cannot be written."""
        header = {
            "format": FORMAT,
            "role": "attention",
            "step": self.step,
            "phase": self.phase,
            "geometry": asdict(self.geometry),
            "q_lens": self.q_lens,
            "kv_lens": self.kv_lens,
            "uids": self.uids,
            "layers": [{"layer_id": layer.layer_id, **asdict(layer.facts)} for layer in self.layers],
            "origin": dict(self.origin),
        }
        tensors = {name: tensor.contiguous() for name, tensor in self._tensors().items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                pass
            save_file(tensors, file.name, metadata={_HEADER: json.dumps(header)})
            os.chmod(file.name, 0o644)
            Path(file.name).replace(path)
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"capsule {str(path)!r} cannot be written: {error}",
                field="record",
                value=str(path),
                remedy="name a folder that can be written, with room in it",
            ) from error

    def with_origin(self, **facts: Any) -> Capsule:
        """The same, with more said of where it comes from."""
        return replace(self, origin={**self.origin, **facts})


def load_capsule(path: str | Path) -> Capsule:
    """Read a capsule. Raises :class:`UsageError` for a path without a file, :class:`CheckpointError` for a file that is
    no capsule, or one of another format.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(
            f"there is no capsule {str(path)!r}",
            field="FILE",
            value=str(path),
            remedy="record one: minisgl generate --record DIR",
        )
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError, ValueError) as error:
        raise _unreadable(path, f"cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise _unreadable(path, "is a safetensors file, but no capsule")
    if (header.get("format"), header.get("role")) != (FORMAT, "attention"):
        found = f"{header.get('role')!r}, format {header.get('format')!r}"
        raise _unreadable(path, f"holds {found}; this version reads 'attention', format {FORMAT}")
    try:
        return _assemble(header, tensors)
    except (KeyError, TypeError, IndexError) as error:
        raise _unreadable(path, f"is incomplete: {type(error).__name__}: {error}") from error


def _unreadable(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"capsule {str(path)!r} {what}", field="FILE", value=str(path), remedy="record it again")


def _assemble(header: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Capsule:
    layers = []
    for place, told in enumerate(header["layers"]):
        layer_id, facts = told["layer_id"], {name: told[name] for name in ("scale", "window", "softcap")}
        named = {name: tensors[f"{name}.{place}"] for name in _PER_LAYER}
        layers.append(RecordedLayer(layer_id, LayerFacts(**facts), **named))
    return Capsule(
        step=header["step"],
        phase=cast("Phase", header["phase"]),
        geometry=Geometry(**header["geometry"]),
        q_lens=tuple(header["q_lens"]),
        kv_lens=tuple(header["kv_lens"]),
        uids=tuple(header["uids"]),
        layers=tuple(layers),
        origin=header["origin"],
        **{name: tensors[name] for name in _PER_STEP},
    )
