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

    A tensor may have several targets (fused experts are two slices of one tensor), and one storage may be filled from
    several tensors (the q, k and v rows of a merged projection).
    """

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint."""
    index: tuple[slice, ...]
    """The part of the tensor that this rank needs."""
    storage: torch.Tensor
    """A view into this rank's storage, of the shape that ``index`` selects. Its dtype may differ: copying converts."""


class WeightSource(Protocol):
    """Named tensors of one checkpoint, under Hugging Face names."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """The dtype that :meth:`read` returns, by its name in torch: ``float32``, ``int64``, ``float8_e4m3fn``."""
        ...

    def order(self, names: Iterable[str]) -> list[str]:
        """Names in the order in which reading is cheapest (file by file)."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Read this part of the tensor to the host, in the file's dtype (float32 for quantised formats)."""
        ...

    def close(self) -> None: ...
