"""Launch Triton kernels in a few microseconds of host time.

At every launch Triton inspects every argument to look up the code that it compiled for that signature. This can take
the host longer than the kernel takes the device. Here only the first launch of a signature goes through Triton, which
compiles the kernel. The compiled code is cached, and later launches pass it addresses and numbers in the same call
that Triton makes itself. The device sees no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from triton import __version__, knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["KNOWN", "Form", "Kernel", "ceil_div", "known", "power_of_two"]

KNOWN: Final = ((3, 4), (3, 9))
"""First and last Triton version whose internal launch call is known; other versions launch through Triton itself."""
_ALIGNED: Final = 16
"""Triton compiles one variant for addresses (bytes) and strides (elements) that are multiples of this, and another for
those that are not."""
_WIDE: Final = 2**31
"""From this value on Triton passes integers as 64 bits."""


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    # triton.cdiv also works inside kernels, and takes microseconds on the host.
    return -(-a // b)


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least ``least`` (1 or more)."""
    return 1 << (least - 1).bit_length()


def known(version: str) -> bool:
    """True if kernels of this Triton version, such as "3.6.0", can be launched directly."""
    major, minor = version.split(".")[:2]
    return KNOWN[0] <= (int(major), int(minor)) <= KNOWN[1]


_DIRECT: Final = known(__version__)


class _Code(NamedTuple):
    """A kernel that Triton compiled for one device, and the call by which Triton launches it."""

    run: Callable[..., Any]
    function: int
    metadata: Any
    stream_of: Callable[[int], int]
    """Device index -> handle of the current stream."""
    owner: Any
    """Triton's compiled kernel: the code is unloaded when this object is collected."""


class Form:
    """A kernel with its constant parameters: made once by :meth:`Kernel.form`, launched often."""

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
        device, align_bits, even, plain = tensors[0].get_device(), 0, True, _DIRECT
        addresses: list[Any] = []
        for tensor in tensors:
            address = tensor.data_ptr()
            addresses.append(address)
            align_bits |= address
        if stride is not None:
            even, numbers = stride % _ALIGNED == 0, (stride, *numbers)
            plain = plain and 1 < stride < _WIDE
        plain = plain and align_bits % _ALIGNED == 0 and not _has_launch_hooks()
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
        """Launch through Triton, which compiles where necessary. Returns None under the interpreter."""
        first: Any = tensors[0]
        if self._block is not None:
            first = TensorDescriptor.from_tensor(first.view(-1, first.shape[-1]), list(self._block))
        made = self._function[grid](first, *tensors[1:], *numbers, *self._constants, **self._options)
        if made is None:
            return None
        return _Code(made.run, made.function, made.packed_metadata, driver.active.get_current_stream, made)


class Kernel:
    """A Triton function and its forms."""

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
    """The address and dtype of a tensor, for a descriptor that may outlive the tensor."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self._address


@lru_cache(maxsize=1024)
def _descriptor(address: int, dtype: torch.dtype, shape: torch.Size, block: tuple[int, int]) -> TensorDescriptor:
    rows, depth = shape[:-1].numel(), shape[-1]
    return TensorDescriptor(_Address(address, dtype), [rows, depth], [depth, 1], list(block))


def _has_launch_hooks() -> bool:
    """True if a launch hook is registered with Triton, as profilers do."""
    begin, end = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool((begin and getattr(begin, "calls", True)) or (end and getattr(end, "calls", True)))
