"""Comparison of tensors with a tolerance, and one-line descriptions of differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

__all__ = ["TOLERANCE", "Mismatch", "close", "expect", "fresh", "same", "unchanged"]

TOLERANCE: Final[Mapping[str, float]] = {
    "float64": 1e-9,
    "float32": 1e-4,
    "float16": 4e-3,
    "bfloat16": 2e-2,
}
"""Largest accepted ``|got - want| / (scale + |want|)`` by the dtype of the result.

Both sides get the same inputs, so this bounds the rounding inside the backend (probabilities in the model's dtype, sums
in another order) and of the result.
"""


class Mismatch(AssertionError):
    """A backend violated the contract of its role."""


def expect(holds: bool, complaint: str) -> None:
    """Raise :class:`Mismatch` unless it holds."""
    if not holds:
        raise Mismatch(complaint)


def close(
    got: torch.Tensor,
    want: torch.Tensor,
    what: str,
    *,
    scale: float = 1.0,
    tolerance: float | None = None,
    slack: torch.Tensor | float = 0.0,
    whose: Callable[[int], str] | None = None,
) -> float:
    """Compare with a float64 reference of the same shape; returns the worst error, relative to ``scale + |want|``.

    ``slack``: additional absolute errors that are accepted, one for each element or one for all. Raises
    :class:`Mismatch` with the worst element; ``whose`` describes its first index. NaN is an error wherever the
    reference has none.
    """
    expect(got.shape == want.shape, f"{what} has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    if not got.numel():
        return 0.0
    limit = TOLERANCE[_name(got.dtype)] if tolerance is None else tolerance
    wide = got.to(torch.float64)
    error = (wide - want).abs() / (scale + want.abs())
    error = torch.where(wide == want, 0.0, error)  # inf - inf
    error = torch.where(wide.isnan() & want.isnan(), 0.0, error.nan_to_num(nan=torch.inf))
    excess = error - slack / (scale + want.abs()) - limit
    worst = float(error.max())
    if float(excess.max()) > 0:
        at = int(excess.argmax())
        where, wrong = _unravel(at, got.shape), int((excess > 0).sum())
        worst, limit = float(error.flatten()[at]), float((error - excess).flatten()[at])
        owner = "" if whose is None else f" ({whose(where[0])})"
        raise Mismatch(
            f"{what}: {wrong} of {got.numel()} elements are wrong; the worst is {list(where)}{owner}: expected "
            f"{float(want[where]):.6g}, got {float(got[where]):.6g} (error {worst:.3g}, allowed {limit:.3g})"
        )
    return worst


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Compare bit for bit, so that NaN equals itself. Raises :class:`Mismatch` with the first difference."""
    expect(got.shape == want.shape, f"{what} has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    expect(got.dtype == want.dtype, f"{what} is {_name(got.dtype)}, expected {_name(want.dtype)}")
    if torch.equal(_bits(got), _bits(want)):
        return
    different = (_bits(got) != _bits(want)).reshape(*got.shape, -1).any(-1)
    where = _unravel(int(different.to(torch.uint8).argmax()), got.shape)
    raise Mismatch(
        f"{what}: {int(different.sum())} of {got.numel()} elements differ; the first is {list(where)}: expected "
        f"{want[where].item()}, got {got[where].item()}"
    )


def unchanged(now: torch.Tensor, before: torch.Tensor, what: str) -> None:
    """``now`` must still equal its copy ``before``."""
    try:
        same(now, before, what)
    except Mismatch as found:
        raise Mismatch(f"{what} was changed: {found}") from None


def fresh(result: torch.Tensor, others: Mapping[str, torch.Tensor], what: str) -> None:
    """``result`` must not share memory with any of the others, which are given by name."""
    address = result.untyped_storage().data_ptr()
    for name, other in others.items():
        expect(
            address != other.untyped_storage().data_ptr(),
            f"{what} shares memory with {name}: it must be a new tensor",
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    where = []
    for size in reversed(shape):
        where.append(flat % size)
        flat //= size
    return tuple(reversed(where))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
