"""Replays with NaN in everything that must have no effect: padding rows, the dummy page, free pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .compare import row_list
from .emulated import EmulatedGraph
from .recorder import fill_garbage
from .snapshot import Snapshot
from .trace import OpRecord, Trace, describe, result_tensors
from .violation import GraphViolation

__all__ = ["Places", "Rows", "run_poisoned"]

Places = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By name: (a float tensor, the indices along its first dimension that must have no effect)."""

SHOWN = 8
"""Rows shown per message."""


class Rows:
    """Number of live rows of a batch, and of rows with padding."""

    __slots__ = ("live", "padded")

    def __init__(self, live: int, padded: int) -> None:
        self.live, self.padded = live, padded

    def live_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` without padding rows, if its first dimension counts rows."""
        by_row = tensor.dim() > 0 and self.padded > 0 and tensor.shape[0] == self.padded
        return tensor[: self.live] if by_row else tensor


def run_poisoned(
    graph: EmulatedGraph[Any],
    shadow: Trace,
    clean: Sequence[torch.Tensor],
    after: Snapshot,
    rows: Rows,
    places: Places,
) -> None:
    """Replay with NaN in ``places`` and, from the first two-dimensional activation on, in the padding rows.

    ``clean`` and ``after`` are result and outside memory of the shadow run. Raises :class:`GraphViolation` where NaN
    turns up in a live row of the result or outside ``places``. The caller puts outside memory back.
    """
    for tensor, indices in places.values():
        tensor.index_fill_(0, indices.long(), float("nan"))
    filled = rows.live == rows.padded
    origins: dict[int, str] = {}
    for operation in graph.run_each():
        if operation.action == "empty":
            fill_garbage(operation.outputs)
        elif not filled:
            filled = _fill_padding(operation, rows)
        _trace_spoilt(operation, shadow.ops[operation.index], rows, origins)
    for name, (tensor, indices) in places.items():
        _check_leak(name, tensor, after.was(tensor), indices)
    storages = {use.holder.untyped_storage().data_ptr(): use.index for use in graph.trace.storages}
    for got, was in zip(result_tensors(graph.result), clean, strict=True):
        storage = storages.get(got.untyped_storage().data_ptr(), -1)
        _check_result(got, was, rows, origins.get(storage, describe(got)))


def _fill_padding(operation: OpRecord, rows: Rows) -> bool:
    for out, fresh in zip(operation.outputs, operation.fresh, strict=True):
        if fresh and out.is_floating_point() and out.dim() == 2 and out.shape[0] == rows.padded:
            out[rows.live :] = float("nan")
            return True
    return False


def _spoilt(got: torch.Tensor, was: torch.Tensor) -> torch.Tensor:
    return torch.isnan(got) & ~torch.isnan(was)


def _trace_spoilt(operation: OpRecord, shadow: OpRecord, rows: Rows, origins: dict[int, str]) -> None:
    """Record for each storage whether its live rows contain NaN now, and which operation introduced it."""
    if operation.action != "run":
        return
    given = next((origins[ref.storage] for ref in operation.inputs if ref.storage in origins), str(operation))
    for got, was, ref in zip(operation.outputs, shadow.values, operation.output_refs, strict=True):
        live = rows.live_part(got)
        if got.is_floating_point() and _spoilt(live, live.new_zeros(()) if was is None else rows.live_part(was)).any():
            origins[ref.storage] = given
        else:
            origins.pop(ref.storage, None)


def _check_result(got: torch.Tensor, was: torch.Tensor, rows: Rows, origin: str) -> None:
    if not got.is_floating_point():
        return
    spoilt = _spoilt(rows.live_part(got), rows.live_part(was))
    if spoilt.any():
        raise GraphViolation(
            "poison",
            origin,
            f"NaN of padding rows or of free pages reached live rows {row_list(spoilt)[:SHOWN]} of the result "
            f"{describe(got)}; mask them, and read only pages that the page table names",
        )


def _check_leak(name: str, tensor: torch.Tensor, was: torch.Tensor, indices: torch.Tensor) -> None:
    spoilt = _spoilt(tensor, was)
    spoilt[indices.long()] = False
    if spoilt.any():
        raise GraphViolation(
            "poison",
            name,
            f"NaN of padding rows was written to live places {row_list(spoilt)[:SHOWN]} of its first dimension; "
            "padding rows may write to the dummy page only",
        )
