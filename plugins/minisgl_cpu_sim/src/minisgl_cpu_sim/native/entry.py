"""Calls into the compiled library: one argument, a struct of 8-byte fields, packed here, declared in the C++."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, Final

import torch

from .build import library

__all__ = ["DTYPE_CODES", "Entry", "threads"]

DTYPE_CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As ``call.h`` numbers them."""

threads = torch.get_num_threads
"""Every kernel is told how many threads to use, so that ``torch.set_num_threads`` holds for it too."""


class Entry:
    """A function of the library, bound at its first call. ``layout``: its struct, as :mod:`struct` spells it.

    A packed struct and one pointer cost a third of what a dozen ctypes arguments do.
    """

    __slots__ = ("_function", "_name", "_pack")

    def __init__(self, name: str, layout: str) -> None:
        self._name = name
        self._pack = struct.Struct(layout).pack
        self._function: Callable[[bytes], Any] = self._bind

    def __call__(self, *fields: float) -> None:
        self._function(self._pack(*fields))

    def _bind(self, packed: bytes) -> None:
        function = getattr(library(), self._name)
        function.argtypes, function.restype = [ctypes.c_char_p], None
        self._function = function
        function(packed)
