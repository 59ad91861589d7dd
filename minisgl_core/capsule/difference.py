"""The largest difference of two results, as the conformance kit measures it, and where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Difference", "Place", "row_of", "worst"]


class Difference(NamedTuple):
    """The worst element: its error is ``(|got - want| - slack) / (scale + |want|)``, infinity for a NaN."""

    error: float
    where: tuple[int, ...]
    """Its index; the first is the token"""
    got: float
    want: float


class Place(NamedTuple):
    """Where an element of a step's result is."""

    row: int
    """Row of the batch"""
    token: int
    """Place among the row's new tokens"""
    part: str
    """Part of the token's result, such as ``head 3``"""
    head: int | None = None
    """Query head; role attention only"""
    experts: tuple[int, ...] = ()
    """The experts of the token, in the model's numbering; role moe only"""

    def __str__(self) -> str:
        return f"row {self.row}, new token {self.token}, {self.part}"


def worst(
    got: torch.Tensor, want: torch.Tensor, scale: float | torch.Tensor = 1.0, slack: float | torch.Tensor = 0.0
) -> Difference:
    """Compare two tensors of one shape, not empty. ``scale`` may differ by token, ``slack`` by element: absolute errors
    that are accepted in addition.

    NaN where ``want`` has one too is no error.
    """
    wide, right = got.to(torch.float64), want.to(torch.float64)
    error = ((wide - right).abs() - slack).clamp(min=0.0) / (scale + right.abs())
    error = torch.where(wide == right, 0.0, error)  # inf - inf
    error = torch.where(wide.isnan() & right.isnan(), 0.0, error.nan_to_num(nan=torch.inf))
    where = tuple(int(index) for index in torch.unravel_index(error.argmax(), error.shape))
    return Difference(float(error[where]), where, float(wide[where]), float(right[where]))


def row_of(token: int, q_lens: Sequence[int]) -> tuple[int, int]:
    """(row, place within the row's new tokens) of a token of a step."""
    for row, count in enumerate(q_lens):
        if token < count:
            return row, token
        token -= count
    raise IndexError(token)
