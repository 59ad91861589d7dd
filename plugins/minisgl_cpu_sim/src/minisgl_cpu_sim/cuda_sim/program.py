"""Compiles kernels for the host and launches them."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from .build import INCLUDE, compile_kernels
from .fault import ACCESSES, KINDS, SimulatedFault, Threads, source_line
from .memory import Array, Extent, extent_of, placed

__all__ = ["Argument", "Shape", "SimulatedProgram", "simulate"]

Argument = Array | int | float
Shape = int | tuple[int, ...]

MAX_BLOCK: Final = (1024, 1024, 64)
MAX_GRID: Final = (2**31 - 1, 65535, 65535)


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
        ("grid", ctypes.c_int64 * 3),
        ("block", ctypes.c_int64 * 3),
        ("dynamic_shared", ctypes.c_int64),
        ("buffers", ctypes.c_void_p),
        ("num_buffers", ctypes.c_int64),
    )


class _Fault(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("access", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("address", ctypes.c_int64),
        ("buffer", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("block", ctypes.c_int64 * 3),
        ("thread", ctypes.c_int64 * 3),
        ("other_block", ctypes.c_int64 * 3),
        ("other_thread", ctypes.c_int64 * 3),
        ("pc", ctypes.c_int64),
        ("file", ctypes.c_char_p),
        ("line", ctypes.c_int64),
        ("text", ctypes.c_char_p),
    )


class SimulatedProgram:
    """CUDA sources whose kernels can be launched on the CPU.

    ``kernels`` are C++ expressions that name one function each: ``scale``, ``ns::copy<float>``. Raises
    :class:`CompileError`.
    """

    def __init__(
        self, sources: Sequence[Path | str], kernels: Sequence[str], *, include_dirs: Sequence[Path | str] = ()
    ) -> None:
        self._path = compile_kernels([Path(s) for s in sources], kernels, [Path(d) for d in include_dirs])
        self._library = ctypes.CDLL(str(self._path))
        self._entries = {
            kernel: ctypes.cast(getattr(self._library, f"minisgl_sim_entry_{i}"), ctypes.c_void_p).value
            for i, kernel in enumerate(kernels)
        }
        self._lock = threading.Lock()

    def launch(
        self,
        kernel: str,
        grid: Shape,
        block: Shape,
        args: Mapping[str, Argument],
        *,
        shared_bytes: int = 0,
        unordered: Mapping[str, range] | None = None,
    ) -> None:
        """Run every block; raises :class:`SimulatedFault` at the first fault.

        ``args``: the kernel's parameters in order, by any names: arrays are passed as pointers, numbers as the
        parameter's type. A struct parameter takes as many as it has fields, all of 8 bytes. ``shared_bytes``: dynamic
        shared memory of each block. ``unordered``: bytes of a buffer that threads may race for, as padding rows do.
        """
        shapes = (_shape("grid", grid, MAX_GRID), _shape("block", block, MAX_BLOCK))
        arrays = {name: value for name, value in args.items() if isinstance(value, np.ndarray | torch.Tensor)}
        extents = [extent_of(array) for array in arrays.values()]
        loose = [(unordered or {}).get(name, range(0)) for name in arrays]
        with self._lock, placed(extents) as addresses:
            pointers = dict(zip(arrays, addresses, strict=True))
            fault = self._run(kernel, shapes, _pack(args, pointers), shared_bytes, extents, addresses, loose)
            if fault.kind:
                raise self._explain(fault, kernel, list(arrays), extents)

    def _run(
        self,
        kernel: str,
        shapes: tuple[tuple[int, int, int], tuple[int, int, int]],
        slots: bytes,
        shared_bytes: int,
        extents: Sequence[Extent],
        addresses: Sequence[int],
        loose: Sequence[range],
    ) -> _Fault:
        table = b"".join(
            struct.pack("6q", at, e.rows, e.row_bytes, e.stride, bytes_.start, bytes_.stop)
            for at, e, bytes_ in zip(addresses, extents, loose, strict=True)
        )
        slots_at, table_at = ctypes.create_string_buffer(slots), ctypes.create_string_buffer(table)
        grid, block = ((ctypes.c_int64 * 3)(*shape) for shape in shapes)
        request = _Launch(
            self._entries[kernel],
            ctypes.addressof(slots_at),
            len(slots) // 8,
            grid,
            block,
            shared_bytes,
            ctypes.addressof(table_at),
            len(extents),
        )
        fault = _Fault()
        self._library.minisgl_sim_run(ctypes.byref(request), ctypes.byref(fault))
        return fault

    def _explain(self, fault: _Fault, kernel: str, names: list[str], extents: Sequence[Extent]) -> SimulatedFault:
        kind = KINDS[fault.kind - 1]
        text = (fault.text or b"").decode()
        in_buffer = fault.buffer >= 0
        source = f"{Path(fault.file.decode()).name}:{fault.line}" if fault.file else ""
        return SimulatedFault(
            kind,
            kernel,
            Threads(_index(fault.block), _index(fault.thread)),
            access=ACCESSES[fault.access] if fault.size else "",
            size=fault.size,
            buffer=names[fault.buffer] if in_buffer else text if fault.size else "",
            offset=fault.offset,
            extent=extents[fault.buffer].span if in_buffer else 0,
            other=Threads(_index(fault.other_block), _index(fault.other_thread)) if kind == "race" else None,
            source=source or source_line(self._path, fault.pc, INCLUDE),
            detail=text,
        )


def simulate(
    sources: Sequence[Path | str],
    kernel: str,
    grid: Shape,
    block: Shape,
    args: Mapping[str, Argument],
    *,
    include_dirs: Sequence[Path | str] = (),
    shared_bytes: int = 0,
    unordered: Mapping[str, range] | None = None,
) -> None:
    """Launch one kernel once. To launch repeatedly, keep a :class:`SimulatedProgram`, which loads it once."""
    program = SimulatedProgram(sources, [kernel], include_dirs=include_dirs)
    program.launch(kernel, grid, block, args, shared_bytes=shared_bytes, unordered=unordered)


def _shape(what: str, shape: Shape, most: tuple[int, int, int]) -> tuple[int, int, int]:
    sizes = (shape,) if isinstance(shape, int) else shape
    if not 1 <= len(sizes) <= 3 or any(not 1 <= n <= m for n, m in zip(sizes, most, strict=False)):
        raise ValueError(f"{what} is {shape}; one to three sizes from 1 up to {most} are possible")
    x, y, z = (*sizes, 1, 1)[:3]
    if what == "block" and x * y * z > MAX_BLOCK[0]:
        raise ValueError(f"block is {shape}: {x * y * z} threads; {MAX_BLOCK[0]} are possible")
    return x, y, z


def _pack(args: Mapping[str, Argument], pointers: Mapping[str, int]) -> bytes:
    """8 bytes each."""
    return b"".join(
        struct.pack("d", value) if isinstance(value, float) else struct.pack("q", int(pointers.get(name, value)))
        for name, value in args.items()
    )


def _index(values: Any) -> tuple[int, int, int]:
    return values[0], values[1], values[2]
