"""Which tensor-parallel rank this process is."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DistributedInfo"]


class DistributedInfo(NamedTuple):
    """``rank`` of ``size`` tensor-parallel ranks, 0-based."""

    rank: int
    size: int

    @property
    def is_primary(self) -> bool:
        return self.rank == 0
