"""A second attention backend beside the one that serves: run on some eager steps, compared, never used.

The first result that differs beyond the conformance kit's tolerance is reported with its step, layer and request, and
that layer is written as a capsule. Then, and whenever the candidate raises, it is disabled: serving goes on as before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minisgl_core.errors import MinisglError
from minisgl_core.kvcache.pool import repaged
from minisgl_core.plugin_api import AttentionBackend, BatchView, KVPool, Phase
from minisgl_core.testing.rig import KitBatch

from .difference import row_of, tolerance_of, worst
from .record import capsule_of, geometry_of, recorded
from .replay import errors_against_reference

if TYPE_CHECKING:
    from minisgl_core.plugin_api import AttentionSetup

    from .watch import LayerCall, WatchedStep

__all__ = ["Divergence", "Shadow", "ShadowCandidate", "ShadowReport"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first result that was too far from the serving backend's."""

    step: int
    phase: Phase
    layer: int
    uid: int
    """Of the request"""
    row: int
    """Of the batch"""
    token: int
    """Place among the row's new tokens"""
    head: int
    error: float
    """``|candidate - serving| / (1 + |serving|)``, infinity for a NaN"""
    tolerance: float
    candidate_error: float
    """Worst error of this layer against the float64 reference"""
    serving_error: float
    """The same of the backend that serves: the larger of the two is the one to look at"""
    capsule: str
    """The file, empty if it could not be written"""

    def __str__(self) -> str:
        found = (
            f"step {self.step} ({self.phase}), layer {self.layer}, request {self.uid}, row {self.row}, "
            f"new token {self.token}, head {self.head}: error {self.error:.3g}, allowed {self.tolerance:.3g}; "
            f"against the float64 reference the candidate's is {self.candidate_error:.3g}, "
            f"the serving backend's {self.serving_error:.3g}"
        )
        return f"{found}; capsule {self.capsule}" if self.capsule else found


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """What a shadow has seen so far."""

    backend: str
    every: int
    steps: int
    """Steps compared"""
    layers: int
    """Layers compared"""
    worst_error: float
    """Of the results that were near enough"""
    divergence: Divergence | None
    disabled: str
    """Why the candidate no longer runs; empty while it does"""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ShadowCandidate:
    """An instance of the candidate for one phase. One that serves both phases may be given twice."""

    backend: AttentionBackend
    page_size: int
    label: str


class Shadow:
    """A :class:`~minisgl_core.capsule.watch.Watcher` that runs and judges a candidate.

    The candidate gets copies of everything that it could write to but the pool; pages that it writes there are found
    and put back. ``folder``: where the capsule of a divergence goes.
    """

    def __init__(
        self,
        candidates: Mapping[Phase, ShadowCandidate],
        every: int,
        folder: Path,
        setup: AttentionSetup,
        page_size: int,
        origin: Mapping[str, Any],
    ) -> None:
        self._candidates, self._every, self._folder, self._origin = dict(candidates), every, folder, origin
        self._facts, self._geometry = setup.layers, geometry_of(setup, page_size)
        self._pool: KVPool | None = None
        self._batch: KitBatch | None = None
        self._steps = self._layers = 0
        self._worst = 0.0
        self._divergence: Divergence | None = None
        self._disabled = ""

    @property
    def report(self) -> ShadowReport:
        """What was seen so far."""
        label = ", ".join(dict.fromkeys(item.label for item in self._candidates.values()))
        return ShadowReport(
            label, self._every, self._steps, self._layers, self._worst, self._divergence, self._disabled
        )

    def bind(self, pool: KVPool) -> None:
        """Give every instance the engine's pool, in its own page size."""
        self._pool = pool
        for item in self._distinct():
            try:
                item.backend.bind_kv(repaged(pool, item.page_size))
            except Exception as error:
                self._disable(f"bind_kv raised {type(error).__name__}: {error}")

    def close(self) -> None:
        """Free the candidate."""
        for item in self._distinct():
            try:
                item.backend.close()
            except Exception as error:
                logger.warning("the shadow backend %s cannot be closed: %s", item.label, error)

    def _distinct(self) -> list[ShadowCandidate]:
        return list({id(item.backend): item for item in self._candidates.values()}.values())

    # A step.

    def wants(self, number: int) -> bool:
        return not self._disabled and number % self._every == 0

    def begin(self, step: WatchedStep) -> bool:
        item = self._candidates.get(step.phase)
        if item is None:
            return False
        batch = _batch_of(step, item.page_size)
        try:
            item.backend.prepare_metadata(batch)
            item.backend.update_metadata(batch)
        except Exception as error:
            self._disable(f"step {step.number}: its metadata raised {type(error).__name__}: {error}")
            return False
        self._batch = batch
        self._steps += 1
        return True

    def layer(self, step: WatchedStep, call: LayerCall, out: torch.Tensor | None, error: str) -> None:
        if self._disabled or out is None or self._batch is None:
            return
        where = f"step {step.number} ({step.phase}), layer {call.layer_id}"
        backend = self._candidates[step.phase].backend
        try:
            got: Any = backend.forward(call.q.clone(), call.k.clone(), call.v.clone(), call.layer_id, self._batch)
        except Exception as raised:
            self._restore(step, call)
            self._disable(f"{where}: forward raised {type(raised).__name__}: {raised}")
            return
        if self._restore(step, call):
            self._disable(f"{where}: it wrote to the KV pool, which a backend must never do; the pages are put back")
        elif not isinstance(got, torch.Tensor) or (got.shape, got.dtype) != (out.shape, out.dtype):
            self._disable(f"{where}: it returned {_told(got)}, expected {_told(out)}")
        else:
            self._judge(step, call, out, got)

    def _restore(self, step: WatchedStep, call: LayerCall) -> bool:
        """Did the candidate change the pages of this step? They hold what they did, in any case."""
        pool, changed = self._pool, False
        assert pool is not None
        for cache, before in ((pool.k_cache, call.k_pages), (pool.v_cache, call.v_pages)):
            pages = cache(call.layer_id)
            now = pages[step.pages]
            if not torch.equal(now.view(torch.uint8), before.view(torch.uint8)):
                pages[step.pages] = before
                changed = True
        return changed

    def _judge(self, step: WatchedStep, call: LayerCall, out: torch.Tensor, got: torch.Tensor) -> None:
        real = step.real_tokens
        found, allowed = worst(got[:real], out[:real]), tolerance_of(out.dtype)
        self._layers += 1
        if found.error <= allowed:
            self._worst = max(self._worst, found.error)
            return
        layer = recorded(call, self._facts[call.layer_id], out)
        capsule = capsule_of(step, self._geometry, (layer,), {**self._origin, "shadow": self.report.backend})
        row, token = row_of(found.token, step.q_lens)
        mine, theirs = errors_against_reference(capsule, 0, (got.cpu(), layer.out))
        divergence = Divergence(
            step=step.number,
            phase=step.phase,
            layer=call.layer_id,
            uid=step.uids[row],
            row=row,
            token=token,
            head=found.head,
            error=found.error,
            tolerance=allowed,
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
        self._batch = None
        logger.warning("the shadow backend %s is disabled, serving goes on: %s", self.report.backend, why)


def _batch_of(step: WatchedStep, page_size: int) -> KitBatch:
    """The candidate's own batch: what it does to it changes nothing."""
    batch = step.batch
    assert batch.positions is not None and batch.out_loc is not None
    view = step.view_in_pages(batch, page_size)
    values = {item.name: getattr(view, item.name) for item in fields(BatchView)}
    copies: dict[str, Any] = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()
    }
    return KitBatch(
        phase=step.phase,
        size=batch.size,
        padded_size=batch.padded_size,
        view=BatchView(**copies),
        positions=batch.positions.clone(),
        out_loc=batch.out_loc.clone(),
        mode=batch.mode,
    )


def _told(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
