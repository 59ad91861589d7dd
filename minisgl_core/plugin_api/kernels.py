"""Makes a plugin's kernels visible to code that records operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["KernelLibrary"]


class KernelLibrary:
    """One ``torch.ops`` namespace of a plugin's own kernels. Create it at module level, register at import.

    A graph runner that records operations then sees each kernel as one, whatever its body does on the host.
    """

    def __init__(self, namespace: str) -> None:
        import torch

        self._namespace = namespace
        self._library = torch.library.Library(namespace, "FRAGMENT")
        self._ops = getattr(torch.ops, namespace)
        self._listeners: Callable[[], int] = torch._C._len_torch_dispatch_stack

    def register(
        self, schema: str, body: Callable[..., Any], devices: tuple[str, ...] = ("CPU",)
    ) -> Callable[..., Any]:
        """Define ``schema`` (torch's notation, mutated arguments marked) and give it a body on these devices.

        The returned callable goes through torch's dispatcher only while a recorder listens: the dispatcher costs more
        than some kernels.
        """
        self._library.define(schema)
        name = schema.partition("(")[0]
        for device in devices:
            self._library.impl(name, body, device)
        op, listeners = getattr(self._ops, name).default, self._listeners

        def call(*args: Any) -> Any:
            return (op if listeners() else body)(*args)

        call.__dict__["library"] = self._library  # torch frees its operations with it, and calling one then crashes
        return call
