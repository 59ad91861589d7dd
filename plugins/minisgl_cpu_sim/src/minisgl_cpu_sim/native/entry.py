"""Calls into the compiled library: one argument, a struct of 8-byte fields, packed here, declared in the C++."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any, Final

import torch

from ..library import Operation, register
from .build import library

__all__ = ["DTYPE_CODES", "Entry", "kernel", "threads"]

DTYPE_CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtype codes, as in ``call.h``."""

threads = torch.get_num_threads
"""Passes the number of threads to every kernel, so that ``torch.set_num_threads`` applies to it."""


class Entry:
    """A function of the library, bound at its first call. ``layout``: its struct in the notation of :mod:`struct`.

    A packed struct and one pointer take a third of the time of a dozen ctypes arguments.
    """

    __slots__ = ("_name", "call", "pack")

    def __init__(self, name: str, layout: str) -> None:
        self._name = name
        self.pack = struct.Struct(layout).pack
        self.call: Callable[[bytes], Any] = self._first_call

    def _first_call(self, packed: bytes) -> None:
        self.function()(packed)

    def function(self) -> Callable[[bytes], Any]:
        """The function; loads the library if necessary."""
        function = getattr(library(), self._name)
        function.argtypes, function.restype = [ctypes.c_char_p], None
        self.call = function
        return self.call


def kernel(schema: str, name: str, layout: str, fields: Callable[..., tuple[float, ...]]) -> Operation:
    """Register the function ``name`` as an operation; ``fields`` makes its struct of the operation's arguments."""
    entry = Entry(name, layout)

    def body(*args: Any) -> None:
        entry.call(entry.pack(*fields(*args)))

    def prepare(*args: Any) -> Callable[[], None]:
        return functools.partial(entry.function(), entry.pack(*fields(*args)))

    return register(schema, body, prepare=prepare)
