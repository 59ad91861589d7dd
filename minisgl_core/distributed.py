"""Which tensor-parallel rank this process is."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DistributedInfo"]


class DistributedInfo(NamedTuple):
    """``rank`` of ``size`` tensor-parallel ranks, 0-based."""

    rank: int
    size: int
    local_rank: int | None = None
    """Among the ranks of this machine; None = all ranks are on it."""

    @property
    def device_index(self) -> int:
        """Number of this rank's device on its machine."""
        return self.rank if self.local_rank is None else self.local_rank

    @property
    def is_primary(self) -> bool:
        return self.rank == 0
