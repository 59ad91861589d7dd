"""Options of the experts ``fused``."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, DirectoryPath

__all__ = ["FusedMoEOptions"]


class FusedMoEOptions(BaseModel):
    """Where tile tables are searched."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tiles: DirectoryPath | None = None
    """A folder with your own tile tables, searched before those of the package."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders to search, at most one."""
        return () if self.tiles is None else (self.tiles,)
