"""The grid of the grouped products is a bound: every block of work is done once, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

import triton
import triton.language as tl

from minisgl_moe.triton_ops.grouped import _where_am_i

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@triton.jit
def _report(out_ptr, total_ptr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    block, column, busy = _where_am_i(total_ptr, COLUMNS, BLOCK_M, GROUP_M)
    at = out_ptr + tl.program_id(0) * 3
    tl.store(at, block)
    tl.store(at + 1, column)
    tl.store(at + 2, busy.to(tl.int32))


@pytest.mark.parametrize(
    ("blocks", "bound", "columns", "group"),
    [
        (5, 12, 6, 8),
        (8, 8, 3, 8),
        (9, 20, 4, 8),
        (0, 4, 3, 4),
        (7, 9, 5, 1),
        (5, 5, 6, 8),  # no program more than there is work
        (9, 9, 4, 8),
        (3, 3, 5, 2),
    ],
)
def test_a_partial_last_group_stays_inside_its_columns(blocks: int, bound: int, columns: int, group: int) -> None:
    total = torch.tensor([blocks * 16], dtype=torch.int32, device=DEVICE)
    out = torch.full((bound * columns, 3), -1, dtype=torch.int32, device=DEVICE)
    _report[(bound * columns,)](out, total, COLUMNS=columns, BLOCK_M=16, GROUP_M=group)
    busy = Counter((block, column) for block, column, is_busy in out.tolist() if is_busy)
    assert busy == Counter({(b, c): 1 for b in range(blocks) for c in range(columns)})
