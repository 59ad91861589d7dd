"""Records chosen steps as capsules."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from minisgl_core.errors import MinisglError

if TYPE_CHECKING:
    import torch

    from .base import Capsule, RecordedLayer
    from .role_observer import LayerCall, ObservedStep
    from .steps import StepChoice

__all__ = ["CapsuleMaker", "Recorder"]

logger = logging.getLogger(__name__)
_MB: Final = 1_000_000


class CapsuleMaker(Protocol):
    """Makes capsules of one role from observed steps."""

    def least_bytes(self, step: Any) -> int:
        """The least size of a step's capsule."""
        ...

    def layer(self, call: Any, out: torch.Tensor | None) -> RecordedLayer:
        """A call and its result (None = it raised), copied to the host."""
        ...

    def capsule(self, step: Any, layers: Sequence[Any], origin: Mapping[str, Any]) -> Capsule:
        """A step with these of its layers."""
        ...


class Recorder:
    """A :class:`~minisgl_core.capsule.role_observer.StepListener` that writes each step into a file such as
    ``step-000012-decode.safetensors``.

    A step larger than ``max_mb`` is skipped, and the log says which and how large. A file that cannot be written ends
    the recording, not the serving. ``suffix`` names the rank.
    """

    def __init__(
        self,
        folder: Path,
        steps: StepChoice,
        max_mb: int,
        maker: CapsuleMaker,
        origin: Mapping[str, Any],
        suffix: str = "",
    ) -> None:
        self.written: list[Path] = []
        self._folder, self._steps, self._max_mb, self._suffix = folder, steps, max_mb, suffix
        self._maker, self._origin = maker, origin
        self._layers: list[RecordedLayer] = []
        self._skipped = self._broken = False
        self._raised = self._backend = ""

    def wants(self, number: int) -> bool:
        return not self._broken and number in self._steps

    def begin(self, step: ObservedStep) -> bool:
        self._layers, self._skipped, self._raised = [], False, ""
        return self._fits(step, self._maker.least_bytes(step))

    def layer(self, step: ObservedStep, call: LayerCall, out: torch.Tensor | None, error: str) -> None:
        if self._skipped:
            return
        self._layers.append(self._maker.layer(call, out))
        self._raised, self._backend = error, call.backend
        if not self._fits(step, sum(layer.nbytes for layer in self._layers)):
            self._layers, self._skipped = [], True

    def _fits(self, step: ObservedStep, size: int) -> bool:
        if size <= self._max_mb * _MB:
            return True
        logger.warning(
            "step %s is not recorded: %s of %s tokens take %.0f MB or more, `record_max_mb` is %s",
            step.number,
            step.phase,
            step.real_tokens,
            size / _MB,
            self._max_mb,
        )
        return False

    def end(self, step: ObservedStep, completed: bool) -> None:
        """Write the capsule, unless something other than the observed backend raised."""
        layers, self._layers = self._layers, []
        if not layers or not (completed or self._raised):
            return
        origin = {"backend": self._backend, **self._origin}
        if self._raised:
            origin["raised"] = self._raised
        capsule = self._maker.capsule(step, layers, origin)
        path = self._folder / f"step-{step.number:06d}-{step.phase}{self._suffix}.safetensors"
        try:
            capsule.save(path)
        except MinisglError as problem:
            self._broken = True
            logger.error("recording ends at step %s: %s", step.number, problem)
            return
        self.written.append(path)
        logger.info("recorded %s to %s", capsule.summary(), path)
