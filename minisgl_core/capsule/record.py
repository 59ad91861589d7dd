"""Writing capsules: of chosen steps, or of the one layer at which something was found."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from minisgl_core.errors import MinisglError

from .format import Capsule, Geometry, RecordedLayer

if TYPE_CHECKING:
    from minisgl_core.plugin_api import AttentionSetup, LayerFacts

    from .steps import StepChoice
    from .watch import LayerCall, WatchedStep

__all__ = ["Recorder", "capsule_of", "geometry_of"]

logger = logging.getLogger(__name__)
_MB: Final = 1_000_000


def geometry_of(setup: AttentionSetup, page_size: int) -> Geometry:
    """A setup as plain data; ``page_size`` is the pool's."""
    return Geometry(
        dtype=str(setup.dtype).removeprefix("torch."),
        kv_dtype=str(setup.kv_dtype).removeprefix("torch."),
        kv_layout=setup.kv_layout,
        page_size=page_size,
        q_heads=setup.q_heads,
        kv_heads=setup.kv_heads,
        head_dim=setup.head_dim,
        max_batch=setup.max_batch,
        max_tokens=setup.max_tokens,
        max_seq_len=setup.max_seq_len,
        batches_in_flight=setup.batches_in_flight,
    )


def capsule_of(
    step: WatchedStep, geometry: Geometry, layers: tuple[RecordedLayer, ...], origin: Mapping[str, Any]
) -> Capsule:
    """A watched step as a capsule."""
    batch, view = step.batch, step.view
    assert batch.positions is not None and batch.out_loc is not None and view.kv_lens_host is not None
    return Capsule(
        step=step.number,
        phase=step.phase,
        geometry=geometry,
        q_lens=step.q_lens,
        kv_lens=view.kv_lens_host,
        uids=step.uids,
        page_ids=step.renumbered(view.page_ids_device).cpu(),
        positions=batch.positions.to(torch.int32).cpu(),
        out_loc=step.renumbered_slots(batch.out_loc).to(torch.int32).cpu(),
        layers=layers,
        origin={"backend": step.label, **origin},
    )


def recorded(call: LayerCall, facts: LayerFacts, out: torch.Tensor | None) -> RecordedLayer:
    """A call and what came of it, on the host."""
    result = torch.full_like(call.q, torch.nan) if out is None else out
    q, k, v, result, k_pages, v_pages = (
        tensor.to("cpu", copy=True) for tensor in (call.q, call.k, call.v, result, call.k_pages, call.v_pages)
    )
    return RecordedLayer(call.layer_id, facts, q, k, v, result, k_pages, v_pages)


class Recorder:
    """A :class:`~minisgl_core.capsule.watch.Watcher` that writes ``step-000012-decode.safetensors`` into a folder.

    A step larger than ``max_mb`` is skipped, and the log says which and how large. A file that cannot be written ends
    the recording, not the serving. ``suffix`` tells ranks apart.
    """

    def __init__(
        self,
        folder: Path,
        steps: StepChoice,
        max_mb: int,
        setup: AttentionSetup,
        page_size: int,
        origin: Mapping[str, Any],
        suffix: str = "",
    ) -> None:
        self.written: list[Path] = []
        self._folder, self._steps, self._max_mb, self._suffix = folder, steps, max_mb, suffix
        self._facts, self._geometry = setup.layers, geometry_of(setup, page_size)
        self._itemsizes = setup.dtype.itemsize, setup.kv_dtype.itemsize
        self._origin = origin
        self._layers: list[RecordedLayer] = []
        self._broken = False

    def wants(self, number: int) -> bool:
        return not self._broken and number in self._steps

    def begin(self, step: WatchedStep) -> bool:
        size = self._size_of(step)
        if size > self._max_mb * _MB:
            logger.warning(
                "step %s is not recorded: %s of %s tokens take %.0f MB, `record_max_mb` is %s",
                step.number,
                step.phase,
                step.real_tokens,
                size / _MB,
                self._max_mb,
            )
            return False
        self._layers = []
        return True

    def _size_of(self, step: WatchedStep) -> int:
        g, (size, kv_size) = self._geometry, self._itemsizes
        rows = 2 * sum(step.q_lens) * (g.q_heads + g.kv_heads) * g.head_dim * size
        pages = 2 * len(step.pages) * g.page_size * g.kv_heads * g.head_dim * kv_size
        return len(self._facts) * (rows + pages)

    def layer(self, step: WatchedStep, call: LayerCall, out: torch.Tensor | None, error: str) -> None:
        self._layers.append(recorded(call, self._facts[call.layer_id], out))
        if error or call.layer_id == len(self._facts) - 1:
            self._write(step, error)

    def _write(self, step: WatchedStep, error: str) -> None:
        origin = {**self._origin, "raised": error} if error else self._origin
        capsule = capsule_of(step, self._geometry, tuple(self._layers), origin)
        self._layers = []
        path = self._folder / f"step-{step.number:06d}-{step.phase}{self._suffix}.safetensors"
        try:
            capsule.save(path)
        except MinisglError as problem:
            self._broken = True
            logger.error("recording ends at step %s: %s", step.number, problem)
            return
        self.written.append(path)
        logger.info("recorded %s to %s", capsule.summary(), path)
