"""Comparison of tokens on the host, for the radix tree: in C++ if there is a compiler, else in NumPy."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import sys
from collections.abc import Callable

import numpy as np

from minisgl_core.plugin_api import CannotRun, host_compiler

from .kv_build import CSRC, compile_source

__all__ = ["match_function", "numpy_match_len"]

_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC")


@functools.cache
def match_function() -> Callable[[np.ndarray, np.ndarray], int]:
    """``f(a, b)``: the length of the common prefix of two contiguous int32 arrays."""
    try:
        return _compiled()
    except (CannotRun, OSError) as error:
        with contextlib.suppress(OSError):  # standard error is not writable
            print(f"minisgl: tokens are compared with NumPy, not C++: {error}", file=sys.stderr)
        return numpy_match_len


def numpy_match_len(a: np.ndarray, b: np.ndarray) -> int:
    """The NumPy version, for machines without a compiler."""
    shared = min(len(a), len(b))
    different = a[:shared] != b[:shared]
    first = int(different.argmax()) if shared else 0
    return first if shared and different[first] else shared


def _compiled() -> Callable[[np.ndarray, np.ndarray], int]:
    source = CSRC / "match_len.cpp"
    library = compile_source("token comparison", (*host_compiler(), *_FLAGS), source, [source])
    function = ctypes.CDLL(str(library)).minisgl_match_len
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
    pack = struct.Struct("PPq").pack

    def match_len(a: np.ndarray, b: np.ndarray) -> int:
        return function(pack(a.ctypes.data, b.ctypes.data, min(len(a), len(b))))  # type: ignore[no-any-return]

    return match_len
