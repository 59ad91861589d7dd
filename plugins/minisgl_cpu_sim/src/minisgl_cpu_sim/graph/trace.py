"""The record of one run: which operations ran, on which parts of which storages, and where they were called."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
import typing_extensions
from torch.utils import _pytree as pytree

__all__ = [
    "Action",
    "OpRecord",
    "StorageUse",
    "TensorRef",
    "Trace",
    "caller",
    "describe",
    "result_tensors",
    "tensors_of",
]

Action = Literal["run", "view", "empty", "host_read"]
"""run: replayed. view: makes another view of known storage, nothing to replay. empty: memory without contents.
host_read: gave the host a value, which stays what it was."""

_INTERNAL = (os.path.dirname(torch.__file__), os.path.dirname(__file__), typing_extensions.__file__)
_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


class TensorRef(NamedTuple):
    """A tensor as an operation met it: the storage, numbered in order of appearance, and which part of it."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class StorageUse:
    """One storage of a trace. ``holder`` keeps it alive, so that its address identifies it."""

    index: int
    external: bool
    """Existed before the run: an input, a weight, a buffer."""
    holder: torch.Tensor
    first: int
    """The first operation that used it."""
    last: int
    written_by: list[int] = field(default_factory=list)
    """The operations that write it in place."""


@dataclass(slots=True)
class OpRecord:
    """One operation. Tensors in ``args`` and ``kwargs`` are private aliases of those that it was called with."""

    index: int
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[TensorRef, ...]
    outputs: tuple[torch.Tensor, ...]
    output_refs: tuple[TensorRef, ...]
    fresh: tuple[bool, ...]
    """For each output: True if it owns new storage (a replay must put its result there)."""
    action: Action
    where: str
    """The line of the step that called it."""
    result: object = None
    """The value of a host read."""
    values: tuple[torch.Tensor | None, ...] = ()
    """Copies of the fresh outputs, taken right after the operation; only in checked runs."""

    @property
    def name(self) -> str:
        return str(self.op)

    def __str__(self) -> str:
        given = ", ".join(describe(x) for x in tensors_of((self.args, self.kwargs)))
        made = ", ".join(describe(x) for x in self.outputs) or describe(self.result)
        return f"#{self.index} {self.name}({given}) -> {made} at {self.where}"


@dataclass(slots=True)
class Trace:
    """All operations of a run, in order, and all storages they touched."""

    ops: list[OpRecord] = field(default_factory=list)
    storages: list[StorageUse] = field(default_factory=list)
    made: list[tuple[int, weakref.ref[torch.Tensor]]] = field(default_factory=list)
    """(operation, a tensor that it returned or made inside), to see later what is still held; only in checked runs."""

    def written(self) -> Iterator[StorageUse]:
        """The storages from outside that the run changes."""
        return (use for use in self.storages if use.external and use.written_by)


def tensors_of(tree: object) -> list[torch.Tensor]:
    """All tensors of nested arguments, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def result_tensors(result: object) -> list[torch.Tensor]:
    """As :func:`tensors_of`, looking into records such as ``StepOutput``, too."""
    if is_dataclass(result):
        return [t for f in fields(result) for t in result_tensors(getattr(result, f.name))]
    return tensors_of(result)


def describe(value: object) -> str:
    """``f32[4, 64]`` for a tensor, the plain value otherwise."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    name = str(value.dtype).removeprefix("torch.")
    kind = name.rstrip("0123456789")
    return f"{_SHORT.get(kind, kind)}{name[len(kind) :]}{list(value.shape)}"


def caller() -> str:
    """``file.py:line in function`` of the innermost frame outside torch, its decorators and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_INTERNAL):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return "?"
