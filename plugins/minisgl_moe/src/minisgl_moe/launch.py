"""Launching Triton's kernels for few microseconds of the host's time.

At every launch Triton looks at every argument, to find the code that it compiled for arguments of their kind; that can
take the host longer than the kernel takes the device. Here the first launch of a kind goes through Triton, which
compiles; the code that it returns is kept, and later launches of the kind give it addresses and numbers, in the same
call that Triton makes itself. The device sees no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from triton import __version__, knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["KNOWN", "Form", "Kernel", "known", "parts", "power_of_two"]

KNOWN: Final = ((3, 4), (3, 9))
"""The first and the last Triton whose way to start a compiled kernel this is; others launch as everybody does."""
_ALIGNED: Final = 16
"""Triton compiles for addresses (bytes) and strides (elements) that are multiples of it, and for others."""
_WIDE: Final = 2**31
"""Numbers from here on are of 64 bits."""


def parts(total: int, of: int) -> int:
    """How many parts of this size hold ``total``. (``triton.cdiv``, made for kernels too, takes microseconds.)"""
    return -(-total // of)


def power_of_two(least: int) -> int:
    """The smallest power of two from ``least`` (at least 1) on."""
    return 1 << (least - 1).bit_length()


def known(version: str) -> bool:
    """Can this Triton's kernels, such as "3.6.0"'s, be started directly?"""
    major, minor = version.split(".")[:2]
    return KNOWN[0] <= (int(major), int(minor)) <= KNOWN[1]


_DIRECT: Final = known(__version__)


class _Code(NamedTuple):
    """What Triton compiled, on its device, and how Triton itself starts it."""

    run: Callable[..., Any]
    function: int
    metadata: Any
    stream_of: Callable[[int], int]
    """Device index -> handle of the current stream."""
    owner: Any
    """Unloads the code when nobody holds it."""


class Form:
    """A kernel with its constants: made once by :meth:`Kernel.form`, launched often."""

    def __init__(
        self, function: Any, constants: tuple[int, ...], warps: int, stages: int, block: tuple[int, int] | None
    ) -> None:
        self._function, self._constants, self._block = function, constants, block
        self._options = {"num_warps": warps, "num_stages": stages}
        self._codes: dict[tuple[Any, ...], _Code] = {}

    def launch(
        self,
        grid: tuple[int, int],
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[int, ...],
        stride: int | None = None,
    ) -> None:
        """Start ``grid`` programs on the current stream of the tensors' device, which is the current one.

        The kernel's parameters are the tensors, the stride if it has one, the numbers and the constants, in this order.
        Triton may compile for the stride alone (``do_not_specialize`` names the numbers, which are below 2**31).
        """
        device, joint, even, plain = tensors[0].get_device(), 0, True, _DIRECT
        addresses: list[Any] = []
        for tensor in tensors:
            address = tensor.data_ptr()
            addresses.append(address)
            joint |= address
        if stride is not None:
            even, numbers = stride % _ALIGNED == 0, (stride, *numbers)
            plain = plain and 1 < stride < _WIDE
        plain = plain and joint % _ALIGNED == 0 and not _watched()
        kind = (device, even, *[tensor.dtype for tensor in tensors])
        code = self._codes.get(kind) if plain else None
        if code is None:
            code = self._launch_by_triton(grid, tensors, numbers)
            if plain and code is not None:
                self._codes[kind] = code
            return
        if self._block is not None:
            addresses[0] = _descriptor(addresses[0], tensors[0].dtype, tensors[0].shape, self._block)
        code.run(
            *grid, 1, code.stream_of(device), code.function, code.metadata, None, None, None,
            *addresses, *numbers, *self._constants,
        )  # fmt: skip

    def _launch_by_triton(
        self, grid: tuple[int, int], tensors: tuple[torch.Tensor, ...], numbers: tuple[int, ...]
    ) -> _Code | None:
        """Launch as everybody does, compiling where need be. None where the interpreter runs."""
        first: Any = tensors[0]
        if self._block is not None:
            first = TensorDescriptor.from_tensor(first.view(-1, first.shape[-1]), list(self._block))
        made = self._function[grid](first, *tensors[1:], *numbers, *self._constants, **self._options)
        if made is None:
            return None
        return _Code(made.run, made.function, made.packed_metadata, driver.active.get_current_stream, made)


class Kernel:
    """A function for Triton, and its forms."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._forms: dict[tuple[Any, ...], Form] = {}

    def form(
        self, constants: tuple[int, ...], *, warps: int, stages: int = 3, block: tuple[int, int] | None = None
    ) -> Form:
        """The kernel with these values of its constant parameters.

        ``block``: the kernel reads its first tensor, contiguous, as a matrix of rows of its last dimension, through a
        tensor descriptor in blocks of this shape.
        """
        key = (constants, warps, stages, block)
        found = self._forms.get(key)
        if found is None:
            found = self._forms[key] = Form(self._function, constants, warps, stages, block)
        return found


class _Address:
    """Stands for a tensor in a descriptor that may outlive it: where it is, and its dtype."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self._address


@lru_cache(maxsize=1024)
def _descriptor(address: int, dtype: torch.dtype, shape: torch.Size, block: tuple[int, int]) -> TensorDescriptor:
    rows, depth = shape[:-1].numel(), shape[-1]
    return TensorDescriptor(_Address(address, dtype), [rows, depth], [depth, 1], list(block))


def _watched() -> bool:
    """Has somebody, such as a profiler, asked Triton to be told of launches?"""
    begin, end = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool((begin and getattr(begin, "calls", True)) or (end and getattr(end, "calls", True)))
