"""The two ends of loading: a source of named tensors, and the storage in a model that receives slices of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["WeightSource", "WeightTarget"]


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """This rank's part of one checkpoint tensor, and the storage that receives it.

    A tensor may feed several targets (fused experts are two slices of one tensor); a storage may be fed by several
    tensors (q, k and v rows of a merged projection).
    """

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint."""
    index: tuple[slice, ...]
    """Which part of it this rank wants."""
    storage: torch.Tensor
    """A view into this rank's storage, of the shape that ``index`` selects; may differ in dtype (copying converts)."""


class WeightSource(Protocol):
    """Named tensors of one checkpoint, under Hugging Face names."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """Of what :meth:`read` returns, as torch names it: ``float32``, ``int64``, ``float8_e4m3fn``."""
        ...

    def order(self, names: Iterable[str]) -> list[str]:
        """The names in the order in which reading them is cheapest (file by file)."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Only that part of the tensor, on the host, in the file's dtype (float32 for quantised formats)."""
        ...

    def close(self) -> None: ...
