"""Checks of the fakes: they refuse calls that a vendor's library would get wrong."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["VendorMisuse", "int32", "refuse_unless_default", "require", "same_device"]


class VendorMisuse(RuntimeError):
    """The real library refuses this call, or answers with a wrong result or an illegal access."""


def require(holds: bool, complaint: str) -> None:
    """Raise :class:`VendorMisuse` unless it holds."""
    if not holds:
        raise VendorMisuse(complaint)


def int32(name: str, tensor: torch.Tensor, dims: int = 1) -> None:
    """Require int32 with a contiguous last dimension, which the kernel assumes."""
    require(isinstance(tensor, torch.Tensor), f"{name} must be a tensor, got {type(tensor).__name__}")
    require(tensor.dtype == torch.int32, f"{name} must be int32, got {str(tensor.dtype).removeprefix('torch.')}")
    require(tensor.dim() == dims, f"{name} must have {dims} dimensions, got shape {tuple(tensor.shape)}")
    require(tensor.shape[-1] <= 1 or tensor.stride(-1) == 1, f"{name} must be contiguous in its last dimension")


def same_device(**tensors: torch.Tensor | None) -> None:
    """Require one device for all tensors that a kernel reads."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    require(len(set(devices.values())) <= 1, f"tensors are on different devices: {devices}")


def refuse_unless_default(where: str, defaults: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Refuse arguments of the real function that the fake does not support."""
    used = [name for name, default in defaults.items() if given[name] is not default and given[name] != default]
    if used:
        raise NotImplementedError(f"the fake {where} does not compute {', '.join(used)}")
