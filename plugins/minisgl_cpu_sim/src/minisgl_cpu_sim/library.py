"""Registers this package's kernels as ``torch.ops.minisgl_cpu`` operations.

A graph runner that records operations then sees each kernel as one operation, whatever its body does on the host.
While nothing records, a call goes directly to the body: torch's dispatcher takes longer than some of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Operation", "prepare", "register"]

_LIBRARY = torch.library.Library("minisgl_cpu", "FRAGMENT")
_listeners: Callable[[], int] = torch._C._len_torch_dispatch_stack
_PREPARE: dict[Any, Callable[..., Callable[[], None]]] = {}


class Operation:
    """A registered operation: called through the dispatcher inside a ``TorchDispatchMode``, directly outside."""

    __slots__ = ("body", "op")

    def __init__(self, op: Callable[..., Any], body: Callable[..., Any]) -> None:
        self.op, self.body = op, body

    def __call__(self, *args: Any) -> Any:
        return (self.op if _listeners() else self.body)(*args)


def register(
    schema: str,
    body: Callable[..., Any],
    devices: tuple[str, ...] = ("CPU",),
    prepare: Callable[..., Callable[[], None]] | None = None,
) -> Operation:
    """Define ``schema`` and give it a body. ``prepare(*args)``: see :func:`prepare`."""
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    for device in devices:
        _LIBRARY.impl(name, body, device)
    op = getattr(torch.ops.minisgl_cpu, name).default
    if prepare is not None:
        _PREPARE[op] = prepare
    return Operation(op, body)


def prepare(op: Any, args: tuple[Any, ...]) -> Callable[[], None] | None:
    """Prepare a call of ``op`` on exactly these tensors for a graph to repeat; None if ``op`` does not support it.

    Addresses, shapes and the number of threads are fixed now. The caller keeps the tensors alive.
    """
    make = _PREPARE.get(op)
    return None if make is None else make(*args)
