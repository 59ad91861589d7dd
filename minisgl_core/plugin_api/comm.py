"""Role ``comm``: collectives between tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["CommSetup", "Communicator"]


@dataclass(frozen=True, slots=True)
class CommSetup:
    """What a communicator is constructed with. ``init_method`` is a torch.distributed rendezvous address."""

    device: torch.device
    rank: int
    size: int
    init_method: str
    timeout_s: float


class Communicator(Protocol):
    """Built as ``Class(setup, options)`` on every rank; with size 1 every call is free."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; returns x."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """(R, N) on each rank -> new (R, N * size): the ranks' columns side by side, in rank order."""
        ...

    def check_equal(self, what: str, digest: str) -> None:
        """Compare a text on all ranks; raises on every rank, with all the values, if they differ."""
        ...

    def barrier(self) -> None: ...

    def close(self) -> None: ...
