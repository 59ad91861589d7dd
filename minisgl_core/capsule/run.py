"""The protocol by which :mod:`.replay` runs a capsule of any role on a backend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from minisgl_core.testing.timing import Timer

__all__ = ["Run", "Times"]


class Times(NamedTuple):
    """Times of a run, in seconds."""

    layer: float
    """Time of one layer"""
    metadata: float | None = None
    """Time of the step's metadata, for roles that have metadata"""


class Run(Protocol):
    """A backend that was built for a capsule, and the capsule's inputs on its device."""

    def results(self) -> Iterable[torch.Tensor]:
        """Every layer's result, on the host. Raises what the backend raises."""
        ...

    def times(self, timer: Timer) -> Times:
        """How long its calls take."""
        ...

    def close(self) -> None:
        """Free the backend."""
        ...
