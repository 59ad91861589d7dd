"""Role ``graph``, without graphs: every step runs eagerly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minisgl_core.errors import EngineError

if TYPE_CHECKING:
    from minisgl_core.plugin_api import BatchLike, GraphSetup, StepOutput

__all__ = ["EagerGraphRunner"]


class EagerGraphRunner:
    """Records nothing, pads nothing."""

    def __init__(self, setup: GraphSetup, options: Any = None) -> None:
        self._s = setup

    def capture(self) -> None:
        """Nothing to record."""

    def pad_batch(self, batch: BatchLike) -> None:
        batch.padded_size = batch.size

    def can_replay(self, batch: BatchLike) -> bool:
        return False

    def replay(self, batch: BatchLike) -> StepOutput:
        raise EngineError("the eager runner has no graphs to replay", field="graph", remedy="check can_replay() first")

    def close(self) -> None:
        """Nothing to free."""
