"""Compares two runs of a step: does the Python code still request the recorded operations?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .trace import OpRecord, StorageUse, TensorRef, Trace, describe
from .violation import GraphViolation

__all__ = ["compare_traces", "equal_values", "row_list"]

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def compare_traces(recorded: Trace, shadow: Trace, names: Mapping[int, str]) -> None:
    """Raise :class:`GraphViolation` at the first operation of ``shadow`` that a replay of ``recorded`` would not do.

    Storages made inside are matched by who makes them, those from outside by address. ``names``: address -> buffer.
    """
    storages = _StorageMatch(recorded, shadow, names)
    for was, now in zip_longest(recorded.ops, shadow.ops):
        if was is None or now is None or was.op is not now.op:
            captured = str(was) if was is not None else "nothing more"
            runs = str(now) if now is not None else "nothing more"
            name = (was or now).name
            raise GraphViolation("control_flow", name, f"captured {captured}, but the step now runs {runs}")
        _compare_arguments(was, now)
        refs = zip((*was.inputs, *was.output_refs), (*now.inputs, *now.output_refs), strict=True)
        for old, new in refs:
            storages.match(old, new, was, now)
            _compare_shapes(old, new, was)
        if was.action == "host_read" and not _same(was.result, now.result):
            raise GraphViolation(
                "host_read", was.name, f"gave the host {was.result!r} at capture and {now.result!r} now, at {was.where}"
            )


class _StorageMatch:
    """Maps storages of the second run to the recorded ones."""

    def __init__(self, recorded: Trace, shadow: Trace, names: Mapping[int, str]) -> None:
        self._recorded, self._shadow, self._names = recorded, shadow, names
        self._pairs: dict[int, int] = {}

    def match(self, old: TensorRef, new: TensorRef, was: OpRecord, now: OpRecord) -> None:
        """Check one operand, and record the pair."""
        known = self._pairs.get(new.storage)
        if known == old.storage or 0 in (*old.shape, *new.shape):
            return
        before, after = self._recorded.storages[old.storage], self._shadow.storages[new.storage]
        if known is not None or before.external != after.external:
            raise GraphViolation("control_flow", was.name, f"another tensor than at capture: {was}, now {now}")
        if before.external:
            self._match_external(before, after, was)
        self._pairs[new.storage] = old.storage

    def _match_external(self, before: StorageUse, after: StorageUse, was: OpRecord) -> None:
        old, new = (use.holder.untyped_storage().data_ptr() for use in (before, after))
        if old == new:
            return
        if was.op is torch.ops.aten.lift_fresh.default:
            if not equal_values(before.holder, after.holder):
                raise GraphViolation(
                    "frozen_value",
                    was.name,
                    f"host data {_short(before.holder)} at capture, {_short(after.holder)} now, at {was.where}",
                )
            return
        name = self._names.get(old) or self._names.get(new) or "a tensor from outside without a name"
        raise GraphViolation(
            "moved_pointer",
            name,
            f"{describe(before.holder)} was at {old:#x} at capture and the step now reads {new:#x} in {was}; "
            "the replay still reads the old memory: keep one buffer and copy into it",
        )


def _compare_arguments(was: OpRecord, now: OpRecord) -> None:
    old, old_form = pytree.tree_flatten((was.args, was.kwargs))
    new, new_form = pytree.tree_flatten((now.args, now.kwargs))
    if old_form != new_form:
        raise GraphViolation("control_flow", was.name, f"called in another way: captured {was}, now {now}")
    for position, (a, b) in enumerate(zip(old, new, strict=True)):
        if not _same(a, b):
            raise GraphViolation(
                "frozen_value",
                was.name,
                f"argument {position} was {a!r} at capture and is {b!r} now, at {was.where}; "
                "the replay uses the old one: keep it in a device buffer",
            )


def _compare_shapes(old: TensorRef, new: TensorRef, was: OpRecord) -> None:
    if old[1:] != new[1:]:
        raise GraphViolation(
            "changed_shape",
            was.name,
            f"shape {list(old.shape)}, stride {list(old.stride)}, offset {old.offset}, {old.dtype} at capture; now "
            f"{list(new.shape)}, {list(new.stride)}, {new.offset}, {new.dtype}, at {was.where}",
        )


def _same(a: Any, b: Any) -> bool:
    """Equality where it can be decided: tensors are compared elsewhere, foreign objects by type."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b) if isinstance(a, _PLAIN) else True


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.flatten()[:8].tolist())


def equal_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same shape and values, NaN equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def row_list(mask: torch.Tensor) -> list[int]:
    """The indices along the first dimension at which any value is true."""
    rows = mask.reshape(mask.shape[0], -1).any(1) if mask.dim() else mask.reshape(1)
    return [int(i) for i in rows.nonzero().flatten()]
