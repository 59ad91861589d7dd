"""Tensors over memory that they do not own.

A captured step writes its results to fixed addresses. A tensor that owned this memory would prevent later captures from
reusing it; a borrowed tensor does not, and holds a :class:`Lease` instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["Lease", "borrowed"]


class Lease:
    """Held by every borrowed tensor. What must outlive the tensor is attached to it by a finalizer."""


class _Bytes:
    """The bytes of a storage, described by the array interfaces of NumPy and of CUDA libraries."""

    def __init__(self, tensor: torch.Tensor, lease: Lease) -> None:
        storage = tensor.untyped_storage()
        usable = storage.nbytes() // tensor.element_size() * tensor.element_size()
        self.lease = lease
        self.description: dict[str, Any] = {
            "shape": (usable,),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 3,
        }


class _HostBytes(_Bytes):
    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.description


class _DeviceBytes(_Bytes):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.description


def borrowed(tensor: torch.Tensor, lease: Lease) -> torch.Tensor:
    """The same elements at the same addresses, holding ``lease`` but not the memory."""
    if tensor.device.type == "cpu":
        flat = torch.from_numpy(np.asarray(_HostBytes(tensor, lease)))
    else:
        flat = torch.as_tensor(_DeviceBytes(tensor, lease), device=tensor.device)
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
