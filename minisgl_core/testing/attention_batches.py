"""Consecutive eager batches: of different sizes, of equal sizes on other pages, and of several instances."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from minisgl_core.plugin_api import BatchView, Phase

from .attention_bench import AttentionBench, Lens, whose
from .compare import close
from .device_fixture import KitBatch

__all__ = ["check_in_flight", "check_in_turn", "check_moved", "lens_of_moved"]


@dataclass(frozen=True, slots=True)
class _Run:
    """A launched batch. ``rows``: the sequences in it."""

    lens: Lens
    rows: Sequence[int]
    wide: torch.Tensor
    result: torch.Tensor


def _start(bench: AttentionBench, backend: Any, batch: KitBatch, lens: Lens, rows: Sequence[int]) -> _Run:
    """Prepare the batch and launch layer 0, without waiting."""
    wide = bench.wide(sum(new for new, _ in lens))
    bench.write_inputs(wide, lens, 0, rows)
    backend.prepare_metadata(batch)
    backend.update_metadata(batch)
    return _Run(lens, rows, wide, backend.forward(*bench.views(wide), 0, batch))


def _judge(bench: AttentionBench, run: _Run, what: str) -> float:
    want = bench.expected(bench.views(run.wide)[0], run.lens, 0, run.rows)
    return close(run.result, want, what, whose=whose(run.lens))


def check_in_flight(bench: AttentionBench, backend: Any, phase: Phase, lens: Lens) -> float:
    """Batches of different sizes and lengths follow each other without synchronization."""
    bench.fill([total for _, total in lens])
    runs = []
    for count in (len(lens), 1, len(lens) - 1, len(lens)) * 2:
        batch = bench.eager(phase, lens[:count])
        runs.append(_start(bench, backend, batch, lens[:count], range(count)))
    return max(_judge(bench, run, f"batch {number} in flight") for number, run in enumerate(runs))


def lens_of_moved(lens: Lens) -> Lens:
    """Lengths of the rows for :func:`check_moved`: two batches."""
    return (*lens, *lens)


def check_moved(bench: AttentionBench, backend: Any, phase: Phase, lens: Lens) -> float:
    """Batches with equal host lengths and shapes, two in flight each time, that differ in everything else.

    First two batches of different rows; then both on other pages; then on the same pages with other contents, as when
    freed pages serve another request. All use the tensors of the first view, like fixed buffers. The rows of the last
    batch before a change are the first ones after it.
    """
    halves = [tuple(range(len(lens))), tuple(reversed(range(len(lens), 2 * len(lens))))]
    rows = (*halves[0], *halves[1])
    held: BatchView | None = None
    worst, count = 0.0, 0
    for change in ("", "pages and contents", "contents"):
        if "pages" in change:
            bench.deal_pages()
        bench.renew()
        bench.fill([total for _, total in lens_of_moved(lens)], rows)
        runs = []
        for own in halves:
            batch = bench.eager(phase, lens, own)
            if held is not None:
                batch.view = _rewritten(held, batch.view)
            runs.append(_start(bench, backend, batch, lens, own))
        held = held or batch.view
        halves.reverse()
        for run in runs:
            what = f"batch {count}, of the same lengths as those before" + (f" with other {change}" if change else "")
            worst, count = max(worst, _judge(bench, run, what)), count + 1
    return worst


def _rewritten(held: BatchView, view: BatchView) -> BatchView:
    """Copy ``view`` into the tensors of ``held``, which have its shapes."""
    for item in fields(BatchView):
        tensor, value = getattr(held, item.name), getattr(view, item.name)
        if isinstance(tensor, torch.Tensor) and tensor is not value:
            tensor.copy_(value)
    return held


def check_in_turn(pairs: Iterable[tuple[AttentionBench, Any]], phase: Phase, lens: Lens) -> float:
    """Several instances, each with its own pool; ``pairs`` creates one after the other.

    All are used each time one has been created, and the first once more after the others are closed.
    """
    alive: list[tuple[AttentionBench, Any]] = []

    def started(place: int) -> _Run:
        bench, backend = alive[place]
        return _start(bench, backend, bench.eager(phase, lens), lens, range(len(lens)))

    worst = 0.0
    for bench, backend in pairs:
        bench.fill([total for _, total in lens])
        alive.append((bench, backend))
        for number in range(2):
            for place, run in enumerate([started(place) for place in range(len(alive))]):
                worst = max(worst, _judge(alive[place][0], run, f"instance {place} of {len(alive)}, batch {number}"))
    for bench, backend in alive[1:]:
        bench.fixture.platform.synchronize()
        backend.close()
    return max(worst, _judge(alive[0][0], started(0), "instance 0, after the others were closed"))
