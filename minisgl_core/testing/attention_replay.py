"""A captured decode step, replayed while lengths grow and shrink, pages move, and rows leave and return."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch

from .attention_bench import AttentionBench
from .check_run import check_growth
from .compare import close, unchanged

__all__ = [
    "CAPTURE_ROWS",
    "LONGEST",
    "CapturedStep",
    "check_replays",
    "check_replays_in_turn",
    "check_stress",
]

CAPTURE_ROWS: Final = 4
LAST: Final = (16, 40, 3)
REPLAYS: Final = ((5, 17, 33), (6, 18, 34), (90, 64, 65), (1, 2), LAST)
"""Lengths of the live rows at each replay, including the new token."""
LONGEST: Final = max(max(lens) for lens in REPLAYS) + 6


@dataclass(frozen=True, slots=True)
class _Replay:
    """One replay and everything needed to judge it, copied before the next one. ``rows``: the sequences
    in the batch.
    """

    lens: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    queries: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]
    pool: tuple[torch.Tensor, torch.Tensor]
    """The pool before and after."""


class CapturedStep:
    """One captured step: all rows of the bench and a dummy row, captured with dummy rows."""

    def __init__(self, bench: AttentionBench, backend: Any, *, host_plan: bool) -> None:
        self._bench, self._backend, self._host_plan = bench, backend, host_plan
        self._layers = range(len(bench.geometry.layers))
        self._size = bench.rows + 1
        self._rows = torch.full((self._size,), bench.rows, dtype=torch.int64, device=bench.fixture.device)
        self._inputs = [bench.wide(self._size) for _ in self._layers]
        bench.fill([1] * bench.rows)
        backend.init_capture_graph(bench.longest, (self._size,))
        self._batch = bench.captured(self._rows)
        backend.prepare_for_capture(self._batch)
        self._captured = bench.fixture.capture(self._step, self._batch)

    def _step(self) -> tuple[torch.Tensor, ...]:
        self._bench.derive(self._batch, self._rows, None)
        self._backend.update_metadata(self._batch)
        views = (self._bench.views(wide) for wide in self._inputs)
        return tuple(self._backend.forward(*given, layer, self._batch) for layer, given in enumerate(views))

    def start(self, lens: tuple[int, ...], rows: tuple[int, ...] | None = None) -> _Replay:
        """Replay on other pages, without waiting."""
        bench, own = self._bench, rows or tuple(range(len(lens)))
        per_row = tuple((1, n) for n in lens)
        self._stage(lens, per_row, own)
        before = bench.pool.storage.clone()
        self._captured.replay()
        live = len(lens)
        return _Replay(
            per_row,
            own,
            tuple(bench.views(wide)[0][:live].clone() for wide in self._inputs),
            tuple(out[:live].clone() for out in self._captured.outputs),
            (before, bench.pool.storage.clone()),
        )

    def _stage(self, lens: tuple[int, ...], per_row: tuple[tuple[int, int], ...], rows: tuple[int, ...]) -> None:
        """Write the device state before a pass, and make the host plan if the backend has one."""
        bench, live = self._bench, len(lens)
        bench.deal_pages()
        bench.fill(lens, rows)
        self._rows.fill_(bench.rows)
        self._rows[:live] = torch.tensor(rows).to(self._rows.device)
        bench.lengths.zero_()
        bench.lengths[self._rows[:live]] = torch.tensor(lens, dtype=torch.int32).to(bench.fixture.device) - 1
        for layer, wide in enumerate(self._inputs):
            bench.write_inputs(wide, per_row, layer, rows)
        if self._host_plan:
            batch = bench.eager("decode", per_row, rows)
            batch.padded_size = self._size
            bench.derive(batch, self._rows, (*lens, *(1,) * (self._size - live)))
            self._backend.prepare_for_replay(batch)

    def judge(self, done: _Replay, what: str) -> float:
        """The worst error."""
        name = f"{what} (live lengths {[total for _, total in done.lens]})"
        worst = 0.0
        for layer, (q, out) in enumerate(zip(done.queries, done.results, strict=True)):
            want = self._bench.expected(q, done.lens, layer, done.rows)
            worst = max(worst, close(out, want, f"{name}, layer {layer}"))
        unchanged(done.pool[1], done.pool[0], f"the pool, by {what},")
        return worst

    def close(self) -> None:
        """Free the graph."""
        self._captured.close()


def check_replays(bench: AttentionBench, backend: Any, *, host_plan: bool) -> float:
    """One replay after another, then two in flight that differ only in rows and pages."""
    step = CapturedStep(bench, backend, host_plan=host_plan)
    worst = max(step.judge(step.start(lens), f"replay {number}") for number, lens in enumerate(REPLAYS))
    for number, done in enumerate([step.start(LAST, (2, 0, 1)), step.start(LAST)]):
        worst = max(
            worst, step.judge(done, f"replay {len(REPLAYS) + number}, of equal lengths on other rows and pages")
        )
    if host_plan:
        check_growth(bench.fixture, lambda: step.judge(step.start(LAST), "a replay after those"))
    step.close()
    return worst


def check_stress(bench: AttentionBench, backend: Any, *, host_plan: bool) -> float:
    """Short rows, half of them, a few of the longest, all of medium length, and short rows again."""
    step = CapturedStep(bench, backend, host_plan=host_plan)
    short = tuple(1 + row % bench.longest for row in range(bench.rows))
    long = tuple(bench.longest - row for row in range(min(3, bench.rows)))
    worst = max(
        step.judge(step.start(lens), f"a replay of {len(lens)} rows")
        for lens in (short, short[::-2], (*long, *short)[: bench.rows], (bench.longest // 4,) * bench.rows, short)
    )
    step.close()
    return worst


def check_replays_in_turn(pairs: Iterable[tuple[AttentionBench, Any]], *, host_plan: bool) -> float:
    """Several instances, each with its own captured step; ``pairs`` creates one after the other.

    All are replayed each time one has been created, and the first once more after the others are closed.
    """
    alive: list[tuple[CapturedStep, Any]] = []
    worst = 0.0
    for bench, backend in pairs:
        alive.append((CapturedStep(bench, backend, host_plan=host_plan), backend))
        for place, (step, _) in enumerate(alive):
            what = f"a replay of instance {place} of {len(alive)}"
            worst = max(worst, step.judge(step.start(REPLAYS[place]), what))
    for step, backend in alive[1:]:
        step.close()
        backend.close()
    first = alive[0][0]
    worst = max(worst, first.judge(first.start(LAST), "a replay of instance 0, after the others were closed"))
    first.close()
    return worst
