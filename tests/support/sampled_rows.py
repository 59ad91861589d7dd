"""Filtered sampling by the Triton kernels, looked into, for the tests that hold its rows to float64.

Shapes: B rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest
import torch

from minisgl_core.testing.ops_reference import gumbel
from minisgl_cuda.triton_ops import sample as module
from minisgl_cuda.triton_ops.filter import WEIGHED

__all__ = ["DEVICE", "EDGE", "NEAR", "ON_GPU", "Found", "Row", "order_of", "randn", "run", "scores"]

ON_GPU: Final = torch.cuda.is_available()
DEVICE: Final = "cuda" if ON_GPU else "cpu"
EDGE: Final = 1e-5
"""A cumulative probability this near to top-p may fall on either side."""
NEAR: Final = 2e-3
"""Scores that differ by less are a tie to float32 arithmetic."""
POSITION: Final = 77
"""Of every row: its noise depends on its seed alone, not on its place."""


@dataclass(frozen=True)
class Row:
    """The parameters of one row. Both halves of its 64-bit seed vary: the upper one is ``-seed``."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 7


@dataclass(frozen=True)
class Found:
    """tokens (B,), and what was known of each row on the way.

    Before the draws: the survivors (V,) bool, without top-p if that is open; whether it is, and so left to draws;
    whether the gathered tokens were enough. After the draws that many programs share: whether one program had to go
    on alone.
    """

    tokens: list[int]
    kept: list[np.ndarray]
    open_p: list[bool]
    decided: list[bool]
    alone: list[bool]


def run(logits: torch.Tensor, rows: Sequence[Row]) -> Found:
    """The operation in mode ``filtered``. logits (B, V) on any device."""
    noted: list[tuple[torch.Tensor, ...]] = []
    real = module.filter_rows

    def looked_into(*args: Any) -> tuple[torch.Tensor, ...]:
        found = real(*args)
        noted.extend((found, tuple(each.clone() for each in found)))  # draws change the first
        return found

    floats = torch.tensor([[r.temperature, r.top_p, r.min_p] for r in rows], device=DEVICE)
    ints = torch.tensor([[r.top_k, r.seed, -r.seed] for r in rows], dtype=torch.int32, device=DEVICE)
    positions = torch.full((len(rows),), POSITION, dtype=torch.int32, device=DEVICE)
    out = torch.full((len(rows),), -9, dtype=torch.int32, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "filter_rows", looked_into)
        module.sample(
            out, logits.to(DEVICE), floats[:, 0], ints[:, 0], floats[:, 1], floats[:, 2], ints[:, 1], ints[:, 2],
            positions, module.FILTERED,
        )  # fmt: skip
    after, before = noted
    _, floor, last, chosen = (each[: len(rows)].cpu().numpy() for each in before)
    orders, ids = order_of(logits.float().cpu().numpy()), np.arange(logits.shape[1])
    kept = [(o > f) | ((o == f) & (ids <= at)) for o, f, at in zip(orders, floor, last, strict=True)]
    alone = after[-1][: len(rows)] == WEIGHED.value
    return Found(out.tolist(), kept, (chosen == WEIGHED.value).tolist(), (chosen >= 0).tolist(), alone.tolist())


def order_of(x: np.ndarray) -> np.ndarray:
    """Numbers of float32 -> int32 that sort alike; both zeros are one."""
    bits = (x.astype(np.float32) + np.float32(0)).view(np.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def scores(logits: torch.Tensor, rows: Sequence[Row]) -> np.ndarray:
    """(B, V) float64: the scaled logits, the largest of a row zero, and the noise of the reference."""
    seeds = np.array([row.seed for row in rows], dtype=np.int32)
    positions = np.full(len(rows), POSITION, dtype=np.int32)
    wide = logits.double().cpu().numpy()
    warmth = np.array([row.temperature for row in rows], dtype=np.float32).astype(np.float64)[:, None]
    noise = gumbel(seeds, -seeds, positions, logits.shape[1])
    found: np.ndarray = (wide - wide.max(1, keepdims=True)) / warmth + noise
    return found


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same for a seed on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
