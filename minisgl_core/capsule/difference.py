"""How far two results are apart, as the conformance kit measures it, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minisgl_core.testing import TOLERANCE

__all__ = ["Difference", "row_of", "tolerance_of", "worst"]


class Difference(NamedTuple):
    """The worst element of (T, H, D): its error is ``|got - want| / (1 + |want|)``, infinity for a NaN."""

    error: float
    token: int
    head: int
    got: float
    want: float


def worst(got: torch.Tensor, want: torch.Tensor) -> Difference:
    """Compare two (T, H, D), T at least 1. NaN where ``want`` has one too is no error."""
    wide, right = got.to(torch.float64), want.to(torch.float64)
    error = (wide - right).abs() / (1.0 + right.abs())
    error = torch.where(wide == right, 0.0, error)  # inf - inf
    error = torch.where(wide.isnan() & right.isnan(), 0.0, error.nan_to_num(nan=torch.inf))
    flat = int(error.argmax())
    _, heads, dim = got.shape
    token, head = flat // (heads * dim), flat // dim % heads
    return Difference(
        float(error.flatten()[flat]), token, head, float(wide.flatten()[flat]), float(right.flatten()[flat])
    )


def tolerance_of(dtype: torch.dtype) -> float:
    """The kit's, for results of this dtype."""
    return TOLERANCE[str(dtype).removeprefix("torch.")]


def row_of(token: int, q_lens: Sequence[int]) -> tuple[int, int]:
    """(row, place within the row's new tokens) of a token of a step."""
    for row, count in enumerate(q_lens):
        if token < count:
            return row, token
        token -= count
    raise IndexError(token)
