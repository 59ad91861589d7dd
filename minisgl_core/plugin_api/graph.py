"""Role ``graph``: how the engine's step is run, eagerly or replayed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from .batch import BatchLike, StepOutput
    from .ops import SamplingMode
    from .platform import Platform

__all__ = ["GraphHost", "GraphRunner", "GraphSetup", "PoisonHost", "padded_size"]


class GraphHost(Protocol):
    """What the core does for a graph runner. Batches are the core's own; runners pass them on."""

    def step(self, batch: Any) -> StepOutput:
        """Derive metadata, run the model, sample, write tokens back: device work only, safe to capture."""
        ...

    def make_capture_batch(self, size: int, mode: SamplingMode) -> Any:
        """A decode batch of ``size`` dummy rows whose inputs are the fixed device buffers; attention is prepared."""
        ...

    def prepare_replay(self, batch: Any) -> None:
        """The host plan of backends that declare ``host_plan``; free for the others."""
        ...

    def input_buffers(self) -> Mapping[str, torch.Tensor]:
        """Every fixed buffer that a captured step reads, by name."""
        ...

    def expected_inputs(self, batch: Any) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """By buffer name: (the part of the buffer this batch reads, what the host's own records say it must hold)."""
        ...


@runtime_checkable
class PoisonHost(Protocol):
    """An optional part of a host: lets a checking runner fill with NaN what a step must not depend on."""

    def poison_targets(self, batch: Any) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """By name: (a float tensor, (N,) indices along its first dimension that must not matter to this batch's rows):
        of each cache, the dummy page and every page that no live row names. The runner puts the contents back.
        """
        ...


@dataclass(frozen=True, slots=True)
class GraphSetup:
    """What a graph runner is constructed with."""

    platform: Platform
    device: torch.device
    host: GraphHost
    bs_list: tuple[int, ...]
    """Batch sizes to capture, ascending; empty = run eagerly."""
    modes: tuple[SamplingMode, ...]
    max_seq_len: int
    progress: Callable[[str, int], Callable[[], None]] | None = None
    """``progress(title, total)`` returns a function to call once per finished item."""


def padded_size(batch: BatchLike, sizes: Sequence[int]) -> int:
    """The smallest of the captured ``sizes`` (ascending) that holds a decode batch; its own size if none does."""
    place = bisect_left(sizes, batch.size)
    return sizes[place] if batch.phase == "decode" and place < len(sizes) else batch.size


class GraphRunner(Protocol):
    """Runs decode steps. Built as ``Class(setup, options)``."""

    def capture(self) -> None:
        """Record every (size, mode); called once, when the model is loaded and the pool bound."""
        ...

    def pad_batch(self, batch: BatchLike) -> None:
        """Set ``batch.padded_size`` to the size it will run at."""
        ...

    def can_replay(self, batch: BatchLike) -> bool: ...

    def replay(self, batch: BatchLike) -> StepOutput:
        """Run the recorded step of ``batch.padded_size`` rows on what the fixed buffers hold now."""
        ...

    def close(self) -> None: ...
