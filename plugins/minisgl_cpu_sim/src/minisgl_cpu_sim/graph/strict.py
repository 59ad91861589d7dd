"""The strict sanitiser: compares a replay with a second run of the Python step on the same inputs.

In order: named buffers at their old addresses; input buffers against the host's own records; the step again, recorded
in shadow and compared with the capture; a replay with NaN in everything that must not matter; then the real replay,
each result against the shadow's. All memory from outside is put back in between: state advances once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch

from .compare import compare_traces, equal_values, row_list
from .emulated import EmulatedGraph, record
from .poison import SHOWN, Places, Rows, run_poisoned
from .recorder import fill_garbage
from .snapshot import Snapshot
from .trace import OpRecord, Trace, describe, result_tensors
from .violation import GraphViolation

__all__ = ["StrictReplay", "check_inputs", "strict_check"]

T = TypeVar("T")
Buffers = Mapping[str, torch.Tensor]
Expected = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By buffer name: (the part that this replay reads, its expected contents)."""

Generation = dict[int, list["weakref.ref[torch.Tensor]"]]
"""By operation: the tensors that one step created and left alive."""

GENERATIONS = 3
"""Successive steps that must each leave a tensor of the same operation before it counts as growth, because a step may
replace what the previous one left.
"""


def strict_check(
    graph: EmulatedGraph[T],
    step: Callable[[], T],
    *,
    buffers: Buffers | None = None,
    expected: Expected | None = None,
    rows: tuple[int, int] = (0, 0),
    poison: Places | None = None,
) -> T:
    """Replay ``graph`` once under all checks; returns its result or raises :class:`GraphViolation`.

    ``step``: what was captured. ``buffers``: fixed inputs by name, for messages. ``expected``: what the host's records
    say. ``rows``: (live rows, rows with padding). ``poison``: what must not matter, see :data:`Places`. Growing memory
    shows only over several replays: keep a :class:`StrictReplay` for that.
    """
    return StrictReplay(graph, step, buffers or {})(buffers or {}, expected or {}, Rows(*rows), poison or {})


class StrictReplay(Generic[T]):
    """One captured step and its Python. ``buffers``: fixed inputs by name, where they lie at capture."""

    def __init__(self, graph: EmulatedGraph[T], step: Callable[[], T], buffers: Buffers) -> None:
        self._graph, self._step = graph, step
        self._addresses = {name: _address(tensor) for name, tensor in buffers.items()}
        self._before, self._after = Snapshot(), Snapshot()
        self._left_behind: list[Generation] = []

    def __call__(self, buffers: Buffers, expected: Expected, rows: Rows, poison: Places) -> T:
        """Replay once, checked; the arguments are those of :func:`strict_check`."""
        self._check_addresses(buffers)
        check_inputs(expected)
        with self._graph.mode():
            try:
                shadow = self._run_before_replay(rows, poison)
                self._run_compared(shadow, poison)
            finally:
                self._after.clear()
        return self._graph.result

    def _check_addresses(self, buffers: Buffers) -> None:
        for name, tensor in buffers.items():
            was, now = self._addresses.get(name), _address(tensor)
            if was is not None and was != now:
                raise GraphViolation(
                    "moved_pointer",
                    name,
                    f"was at {was:#x} at capture and is at {now:#x} now; the replay still reads the old memory: "
                    "keep one buffer and copy into it",
                )

    def _run_before_replay(self, rows: Rows, poison: Places) -> Trace:
        """Run the comparison and the poisoned replay; memory outside is unchanged afterwards, also after an error."""
        try:
            for tensor, _ in poison.values():
                self._before.save(tensor)
            shadow, clean = self._run_shadow()
            if poison or rows.live < rows.padded:
                run_poisoned(self._graph, shadow, clean, self._after, rows, poison)
            return shadow
        finally:
            self._before.restore()
            self._before.clear()

    def _run_shadow(self) -> tuple[Trace, list[torch.Tensor]]:
        """Run the Python step and compare its operations. Leaves the memory that it changed in ``_after``."""
        trace, result = record(self._step, checked=True, before_write=self._before.save)
        clean = [tensor.clone() for tensor in result_tensors(result)]
        del result
        compare_traces(self._graph.trace, trace, {address: name for name, address in self._addresses.items()})
        self._check_growth(trace)
        for live in self._before.live():
            self._after.save(live)
        self._before.restore()
        return trace, clean

    def _check_growth(self, trace: Trace) -> None:
        if _held(trace):
            gc.collect(1)
        kept: Generation = {}
        for index, ref in _held(trace):
            kept.setdefault(index, []).append(ref)
        self._left_behind = [*self._left_behind, kept][-GENERATIONS:]
        for index in kept:
            if self._grows(index):
                raise GraphViolation(
                    "growing_memory",
                    trace.ops[index].name,
                    f"each of the last {GENERATIONS} steps left a tensor behind in {trace.ops[index]}; "
                    "allocate once, before the capture",
                )

    def _grows(self, index: int) -> bool:
        """True if each of the last generations still holds separate memory of this operation."""
        held = [
            {_address(tensor) for ref in past.get(index, ()) if (tensor := ref()) is not None}
            for past in self._left_behind
        ]
        alone = [own - set().union(*(other for other in held if other is not own)) for own in held]
        return len(held) == GENERATIONS and all(alone)

    def _run_compared(self, shadow: Trace, poison: Places) -> None:
        for operation in self._graph.run_each():
            if operation.action == "empty":
                fill_garbage(operation.outputs)
            else:
                _compare_values(operation, shadow.ops[operation.index])
        for tensor, indices in poison.values():
            self._after.was(tensor).index_copy_(0, indices.long(), tensor.index_select(0, indices.long()))
        for live, saved in self._after.pairs():
            if not torch.equal(live, saved):
                raise self._different_state(_address(live))

    def _different_state(self, address: int) -> GraphViolation:
        name = next((name for name, a in self._addresses.items() if a == address), "memory from outside")
        uses = [use for use in self._graph.trace.written() if _address(use.holder) == address]
        writer = self._graph.trace.ops[uses[0].written_by[-1]] if uses else "nothing in the capture"
        return GraphViolation(
            "different_value", name, f"the replay leaves other contents than the step does; last written by {writer}"
        )


def check_inputs(expected: Expected) -> None:
    """Raise for the first buffer that differs from the host's records."""
    for name, (got, want) in expected.items():
        if got.shape != want.shape:
            raise GraphViolation("changed_shape", name, f"is {describe(got)}, the host's records say {describe(want)}")
        wrong = got != want.to(got.device, got.dtype)
        if wrong.any():
            rows = row_list(wrong)[:SHOWN]
            raise GraphViolation(
                "stale_buffer",
                name,
                f"rows {rows} hold {_rows(got, rows)}, the host's records say {_rows(want, rows)}; the upload is "
                "missing, or came after the replay",
            )


def _held(trace: Trace) -> list[tuple[int, weakref.ref[torch.Tensor]]]:
    """Tensors that the run created and that are still referenced."""
    outside = {_address(use.holder) for use in trace.storages if use.external}
    held = []
    for index, ref in trace.made:
        tensor = ref()
        if tensor is not None and _address(tensor) not in outside:
            held.append((index, ref))
    return held


def _compare_values(operation: OpRecord, shadow: OpRecord) -> None:
    for got, want in zip(operation.outputs, shadow.values, strict=True):
        if want is not None and not equal_values(got, want):
            raise GraphViolation(
                "different_value",
                operation.name,
                f"the replay gives {_first_difference(got, want)}, in {operation}; it reads something that is not "
                "among its arguments, or leaves a part of its result unwritten",
            )


def _first_difference(got: torch.Tensor, want: torch.Tensor) -> str:
    same = (got == want) | ((got != got) & (want != want))
    where = tuple(int(i) for i in (~same).nonzero()[0])
    return f"{got[where].item()} instead of {want[where].item()} at {list(where)}"


def _rows(tensor: torch.Tensor, rows: list[int]) -> str:
    shown = tensor[rows] if tensor.dim() else tensor
    return str(shown.flatten()[:SHOWN].tolist())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
