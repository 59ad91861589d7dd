"""What is launched, in which shape: everything that is decided on the host before a kernel runs."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from ..kv_build import compile_kernels

if TYPE_CHECKING:
    import torch

    from minisgl_core.plugin_api import Platform

__all__ = ["INDEX", "STORE", "UNITS", "CompiledLauncher", "Kernel", "Launcher", "Shape", "shape_for", "unit_of"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A template of the CUDA sources. ``fields``: those of its one argument, a struct, all 8 bytes."""

    template: str
    fields: tuple[str, ...]

    def instance(self, unit: int) -> str:
        """The name of the kernel that moves ``unit`` bytes at a time."""
        return f"{self.template}<{UNITS[unit]}>"


UNITS: Final = {16: "minisgl::Bytes16", 4: "uint32_t", 2: "uint16_t", 1: "uint8_t"}
"""By their size in bytes, widest first."""

STORE: Final = Kernel(
    "minisgl::kv_store",
    (
        "k_cache",
        "v_cache",
        "k",
        "v",
        "out_loc",
        "k_slot_bytes",
        "v_slot_bytes",
        "k_token_bytes",
        "v_token_bytes",
        "row_units",
        "tokens",
    ),
)
INDEX: Final = Kernel(
    "minisgl::kv_index", ("out", "table", "ids", "start", "rows", "table_row_bytes", "row_units", "tokens")
)

WARP: Final = 32
BLOCK: Final = 256
"""Threads"""
SPREAD: Final = 256
"""Blocks below which a block gets one row only: small batches should reach many multiprocessors."""


class Shape(NamedTuple):
    """A launch: ``blocks`` of ``rows`` rows, each moved by ``lanes`` threads."""

    blocks: int
    lanes: int
    rows: int


def unit_of(*numbers: int) -> int:
    """The widest unit that divides all these addresses and lengths."""
    joint = 0
    for number in numbers:
        joint |= number
    return next(unit for unit in UNITS if joint % unit == 0)


def shape_for(rows: int, units: int) -> Shape:
    """One warp or several for each of ``rows`` rows of ``units`` units; ``rows`` is not 0."""
    lanes = max(WARP, min(BLOCK, -(-units // WARP) * WARP))
    per_block = max(1, min(BLOCK // lanes, rows // SPREAD))
    return Shape(-(-rows // per_block), lanes, per_block)


class Launcher(Protocol):
    """Runs kernels on the current stream: on a GPU, or in a simulator."""

    def launch(self, kernel: Kernel, unit: int, shape: Shape, values: tuple[torch.Tensor | int, ...]) -> None:
        """``values`` in the order of ``kernel.fields``; of a tensor, its address."""
        ...


class CompiledLauncher:
    """The GPU. ``dependent``: programmatic dependent launches (compute capability 9.0 or newer)."""

    def __init__(self, platform: Platform, dependent: bool | None = None) -> None:
        library = ctypes.CDLL(str(compile_kernels(platform.sm)))
        self._stream = platform.stream_handle
        self._dependent = int(platform.sm >= 90 if dependent is None else dependent)
        self._launch = library.minisgl_cuda_launch
        self._launch.argtypes, self._launch.restype = [ctypes.c_char_p], ctypes.c_int
        self._error = library.minisgl_cuda_error
        self._error.argtypes, self._error.restype = [ctypes.c_int], ctypes.c_char_p
        self._find = library.minisgl_cuda_find
        self._find.argtypes, self._find.restype = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)], ctypes.c_int
        self._kernels = {(k, unit): self._load(k.instance(unit)) for k in (STORE, INDEX) for unit in UNITS}

    def _load(self, name: str) -> int:
        kernel = ctypes.c_void_p()
        self._check(name, self._find(name.encode(), ctypes.byref(kernel)))
        return kernel.value or 0

    def launch(self, kernel: Kernel, unit: int, shape: Shape, values: tuple[torch.Tensor | int, ...]) -> None:
        """See :class:`Launcher`."""
        numbers = [value if type(value) is int else value.data_ptr() for value in values]  # type: ignore[union-attr]
        head = (self._kernels[kernel, unit], self._stream(), *shape, self._dependent)
        request = struct.pack(f"{len(head) + len(numbers)}q", *head, *numbers)
        self._check(kernel.template, self._launch(request))

    def _check(self, name: str, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"{name}: CUDA error {status}: {self._error(status).decode()}")
