"""Launches kernels of the CUDA sources. Everything that can be decided once is decided in :meth:`Launcher.prepare`."""

from __future__ import annotations

import ctypes
import itertools
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from .kv_build import compile_kernels

if TYPE_CHECKING:
    import torch

    from minisgl_core.plugin_api import Platform

__all__ = ["Alive", "CompiledLauncher", "Kernel", "Launcher", "Run", "Shape"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel template of the CUDA sources.

    ``fields``: the fields of its only argument, a struct; each has 8 bytes, and pointers come first.
    """

    template: str
    fields: tuple[str, ...]
    floats: frozenset[str] = frozenset()
    """Fields that are doubles; the others are integers or pointers."""

    def instance(self, arguments: str) -> str:
        """The name of a kernel, such as ``ns::kernel<float, 4>``."""
        return f"{self.template}<{arguments}>"

    @property
    def layout(self) -> str:
        """The layout of the struct in the notation of :mod:`struct`."""
        return "".join("d" if name in self.floats else "q" for name in self.fields)


class Shape(NamedTuple):
    """A launch shape: ``blocks`` of ``rows`` rows, each processed by ``lanes`` threads."""

    blocks: int
    lanes: int
    rows: int


Run = Callable[["Shape", "tuple[torch.Tensor | None, ...]", "tuple[float, ...]"], None]
"""``run(shape, tensors, values)`` launches one kernel. ``values``: its fields; they begin with the tensors' addresses,
in order, 0 for None.
"""


class Launcher(Protocol):
    """Runs kernels on the current stream: on a GPU, or in a simulator."""

    def prepare(self, kernel: Kernel, arguments: str) -> Run:
        """Load the template's instance."""
        ...


class CompiledLauncher:
    """Launches on the GPU. ``dependent``: programmatic dependent launches (compute capability 9.0 or newer)."""

    def __init__(self, platform: Platform, dependent: bool | None = None) -> None:
        # PyDLL keeps the interpreter lock: releasing and reacquiring it takes longer than a launch.
        library = ctypes.PyDLL(str(compile_kernels(platform.sm)))
        self._stream = platform.stream_handle
        self._dependent = int(platform.sm >= 90 if dependent is None else dependent)
        self._launch = library.minisgl_cuda_launch
        self._launch.argtypes, self._launch.restype = [ctypes.c_char_p], ctypes.c_int
        self._error = library.minisgl_cuda_error
        self._error.argtypes, self._error.restype = [ctypes.c_int], ctypes.c_char_p
        self._find = library.minisgl_cuda_find
        self._find.argtypes, self._find.restype = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)], ctypes.c_int

    def prepare(self, kernel: Kernel, arguments: str) -> Run:
        """See :class:`Launcher`."""
        found = ctypes.c_void_p()
        self._check(kernel.instance(arguments), self._find(kernel.instance(arguments).encode(), ctypes.byref(found)))
        handle, dependent, launch, stream = found.value or 0, self._dependent, self._launch, self._stream
        pack = struct.Struct(f"6q{kernel.layout}").pack

        def run(shape: Shape, tensors: tuple[torch.Tensor | None, ...], values: tuple[float, ...]) -> None:
            status = launch(pack(handle, stream(), *shape, dependent, *values))
            if status:
                self._check(kernel.template, status)

        return run

    def _check(self, name: str, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"{name}: CUDA error {status}: {self._error(status).decode()}")


Thing = TypeVar("Thing")


class Alive(Generic[Thing]):
    """Objects by number, for operations that accept only tensors and numbers. An entry lives as long as its owner."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._things: dict[int, Thing] = {}
        self.find = self._things.__getitem__

    def add(self, owner: object, thing: Thing) -> int:
        """Register an object and return its number. The object must not refer to its owner."""
        number = next(self._numbers)
        self._things[number] = thing
        weakref.finalize(owner, self._things.pop, number, None)
        return number
