"""Registers this package's kernels as ``torch.ops.minisgl_cpu`` operations.

A graph runner that records operations then sees each kernel as one, whatever its body does on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["register"]

_LIBRARY = torch.library.Library("minisgl_cpu", "FRAGMENT")  # type: ignore[no-untyped-call]


def register(schema: str, body: Callable[..., Any], devices: tuple[str, ...] = ("CPU",)) -> Callable[..., Any]:
    """Define ``schema`` and give it a body; returns the operation to call."""
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    for device in devices:
        _LIBRARY.impl(name, body, device)  # type: ignore[no-untyped-call]
    operation: Callable[..., Any] = getattr(torch.ops.minisgl_cpu, name).default
    return operation
