"""A shadow: a second backend that runs on some eager steps and is compared with the serving one; its results are not
used.

The first result that differs beyond the conformance kit's tolerance is reported with its step, layer and request, and
that layer is written as a capsule. Then, and whenever the candidate raises, it is disabled: serving goes on as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from minisgl_core.errors import MinisglError
from minisgl_core.plugin_api import KVPool, Phase

from .difference import Difference, worst

if TYPE_CHECKING:
    from .base import Capsule
    from .record import CapsuleMaker
    from .role_observer import LayerCall, ObservedStep

__all__ = ["Candidate", "Divergence", "Shadow", "ShadowReport"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first result that differed too much from the serving backend's."""

    step: int
    phase: Phase
    layer: int
    uid: int
    """Id of the request"""
    row: int
    """Row of the batch"""
    token: int
    """Place among the row's new tokens"""
    part: str
    """Part of the token's result, such as ``head 3``"""
    head: int | None
    """Query head; role attention only"""
    experts: tuple[int, ...]
    """The experts of the token, in the model's numbering; role moe only"""
    error: float
    """``(|candidate - serving| - slack) / (scale + |serving|)``, infinity for a NaN. The scale is as in a replay, the
    slack is what the stated tolerances of the two explain.
    """
    tolerance: float
    candidate_error: float
    """Worst error of this layer against the float64 reference"""
    serving_error: float
    """Worst error of the serving backend's layer; the larger of the two errors shows which backend is wrong"""
    capsule: str
    """Path of the capsule; empty if it could not be written"""

    def __str__(self) -> str:
        found = (
            f"step {self.step} ({self.phase}), layer {self.layer}, request {self.uid}, row {self.row}, "
            f"new token {self.token}, {self.part}: error {self.error:.3g}, allowed {self.tolerance:.3g}; "
            f"against the float64 reference the candidate's is {self.candidate_error:.3g}, "
            f"the serving backend's {self.serving_error:.3g}"
        )
        return f"{found}; capsule {self.capsule}" if self.capsule else found


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """The results of a shadow so far."""

    backend: str
    every: int
    steps: int
    """Steps compared"""
    layers: int
    """Layers compared"""
    worst_error: float
    """Worst error of the results within the tolerance"""
    divergence: Divergence | None
    disabled: str
    """Why the candidate no longer runs; empty while it does"""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return asdict(self)


class Candidate(Protocol):
    """A second backend of a role. Its methods may raise; steps and calls are of its role."""

    @property
    def label(self) -> str: ...

    @property
    def needs_finite_tail(self) -> bool:
        """Does it need the unused tail of a KV page finite?"""
        ...

    @property
    def tolerance(self) -> float:
        """The error that it states, as in ``Caps``."""
        ...

    def bind(self, pool: KVPool) -> None:
        """The engine's KV pool exists now."""
        ...

    def prepare_weights(self, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Role moe: a layer's weights (E, 2I, N) and (E, N, I), to keep."""
        ...

    def begin(self, step: Any) -> bool:
        """The step's metadata. False = it does not serve this phase."""
        ...

    def forward(self, step: Any, call: Any) -> Any:
        """Its result for a layer, from copies of the inputs."""
        ...

    def restore(self, step: Any, call: Any) -> str:
        """Put back what it changed and does not own, and describe it; empty if there was nothing."""
        ...

    def close(self) -> None:
        """Free the backend."""
        ...


class Shadow:
    """A :class:`~minisgl_core.capsule.role_observer.StepListener` that runs and judges a candidate.

    ``folder``: where the capsule of a divergence goes. ``serving_tolerance``: the error that the
    serving backends state; it is added to the candidate's.
    """

    def __init__(
        self,
        candidate: Candidate,
        every: int,
        folder: Path,
        kind: type[Capsule],
        maker: CapsuleMaker,
        origin: Mapping[str, Any],
        serving_tolerance: float = 0.0,
    ) -> None:
        self._stated = candidate.tolerance + serving_tolerance
        self._candidate, self._every, self._folder, self._origin = candidate, every, folder, origin
        self._kind, self._maker = kind, maker
        self._steps = self._layers = 0
        self._worst = 0.0
        self._divergence: Divergence | None = None
        self._disabled = ""

    @property
    def report(self) -> ShadowReport:
        """The results so far."""
        label = self._candidate.label
        return ShadowReport(
            label, self._every, self._steps, self._layers, self._worst, self._divergence, self._disabled
        )

    @property
    def needs_finite_tail(self) -> bool:
        """Does the candidate need the unused tail of a KV page finite?"""
        return self._candidate.needs_finite_tail

    def bind(self, pool: KVPool) -> None:
        """Give the candidate the engine's KV pool; it is disabled if it raises."""
        self._set_up("bind_kv", lambda: self._candidate.bind(pool))

    def prepare_weights(self, layer_id: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Give an expert executor the weights of a layer, to keep; it is disabled if it raises."""
        self._set_up("prepare_weights", lambda: self._candidate.prepare_weights(layer_id, w13, w2))

    def _set_up(self, what: str, call: Callable[[], None]) -> None:
        if not self._disabled:
            try:
                call()
            except Exception as error:
                self._disable(f"{what} raised {type(error).__name__}: {error}")

    def close(self) -> None:
        """Free the candidate."""
        try:
            self._candidate.close()
        except Exception as error:
            logger.warning("the shadow backend %s cannot be closed: %s", self._candidate.label, error)

    # A step.

    def wants(self, number: int) -> bool:
        return not self._disabled and number % self._every == 0

    def begin(self, step: ObservedStep) -> bool:
        try:
            served = self._candidate.begin(step)
        except Exception as error:
            self._disable(f"step {step.number}: its metadata raised {type(error).__name__}: {error}")
            return False
        self._steps += served
        return served

    def layer(self, step: ObservedStep, call: LayerCall, out: torch.Tensor | None, error: str) -> None:
        if self._disabled or out is None:
            return
        where = f"step {step.number} ({step.phase}), layer {call.layer_id}"
        try:
            got = self._candidate.forward(step, call)
        except Exception as raised:
            self._candidate.restore(step, call)
            self._disable(f"{where}: forward raised {type(raised).__name__}: {raised}")
            return
        intruded = self._candidate.restore(step, call)
        if intruded:
            self._disable(f"{where}: {intruded}")
        elif not isinstance(got, torch.Tensor) or (got.shape, got.dtype) != (out.shape, out.dtype):
            self._disable(f"{where}: it returned {_kind_of(got)}, expected {_kind_of(out)}")
        else:
            self._judge(step, call, out, got)

    def end(self, step: ObservedStep, completed: bool) -> None:
        """Nothing is left to do: each layer was judged when it ran."""

    def _judge(self, step: ObservedStep, call: LayerCall, out: torch.Tensor, got: torch.Tensor) -> None:
        real = call.real_tokens
        allowed = self._kind.tolerance(out.dtype)
        scale = self._kind.usual_size(out[:real], out.dtype)
        found, capsule = worst(got[:real], out[:real], scale), None
        if found.error > allowed:
            capsule = self._capsule_of(step, call, out)
            if self._stated:
                slack = capsule.slack(0, self._stated).to(out.device)
                found = worst(got[:real], out[:real], scale, slack)
        self._layers += 1
        if capsule is None or found.error <= allowed:
            self._worst = max(self._worst, found.error)
        else:
            self._report(step, call, got, found, capsule)

    def _capsule_of(self, step: ObservedStep, call: LayerCall, out: torch.Tensor) -> Capsule:
        origin = {"backend": call.backend, **self._origin, "shadow": self._candidate.label}
        return self._maker.capsule(step, (self._maker.layer(call, out),), origin)

    def _report(
        self, step: ObservedStep, call: LayerCall, got: torch.Tensor, found: Difference, capsule: Capsule
    ) -> None:
        place = capsule.locate(0, found)
        mine, theirs = capsule.errors(0, (got.cpu(), capsule.layers[0].out))
        divergence = Divergence(
            step=step.number,
            phase=step.phase,
            layer=call.layer_id,
            uid=step.uids[place.row],
            **place._asdict(),
            error=found.error,
            tolerance=self._kind.tolerance(got.dtype),
            candidate_error=mine,
            serving_error=theirs,
            capsule="",
        )
        path = self._folder / f"shadow-step-{step.number:06d}-{step.phase}-layer-{call.layer_id}.safetensors"
        try:
            capsule.with_origin(diverged=str(divergence)).save(path)
            divergence = replace(divergence, capsule=str(path))
        except MinisglError as problem:
            logger.warning("%s", problem)
        self._divergence = divergence
        self._disable(f"it diverged at {divergence}")

    def _disable(self, why: str) -> None:
        self._disabled = why
        logger.warning("the shadow backend %s is disabled, serving goes on: %s", self._candidate.label, why)


def _kind_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
