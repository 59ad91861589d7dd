"""Device memory comes back after ``shutdown()``, engine after engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl_core.testing import DeviceFixture
from support.driver import greedy
from support.gpu.backends import attention_pairs
from support.gpu.check import Context, expect
from support.gpu.collect import context_of
from support.gpu.serving import answers, serve
from support.make_checkpoints import ensure_checkpoint

pytestmark = pytest.mark.gpu
ROUNDS = 3
GROWTH_BYTES = 2**20
"""Between the second engine and the last: nothing but the allocator's rounding"""
WORKSPACE_BYTES = 256 * 2**20
"""What libraries may keep after the first engine"""
POOL_TOKENS = {"cuda": 1 << 19, "cpu": 1 << 12}
"""On a GPU the pool is far larger than any workspace, so that a pool that stays is seen."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """attention:torch in float32, and each pair of attention backends in bfloat16."""
    plain = pytest.param(
        {"prefill": "torch", "decode": "torch"}, "float32", id="torch", marks=pytest.mark.check(seconds=20.0)
    )
    metafunc.parametrize(("attention", "dtype"), [plain, *(
        pytest.param(pair.backends, "bfloat16", id=pair.name, marks=pytest.mark.check(
            seconds=12.0, session="memory/pairs", quick=pair.main, needs=pair.needs,
        ))
        for pair in attention_pairs(context_of(metafunc.config))
    )])  # fmt: skip


def test_memory(attention: dict[str, str], dtype: str, context: Context) -> None:
    """Engines one after the other in one process: equal answers, and no more memory in use after each shutdown."""
    model, prompts = ensure_checkpoint("q3-bf16"), [[7, 8, 9], list(range(3, 60))]
    settings: dict[str, Any] = {
        "pool_tokens": POOL_TOKENS[context.kind],
        "max_running_req": 4,
        "backends": {"attention": attention},
    }
    left, given = [], []
    with DeviceFixture(context.device).memory_watch() as in_use:
        before = in_use()
        for _ in range(ROUNDS):
            with serve(context, model, dtype=dtype, **settings) as llm:
                given.append(answers(llm, prompts, greedy(8)))
                during = in_use()
            del llm
            if context.kind == "cuda":  # cuBLAS keeps a workspace per stream, and each engine has its own streams
                torch._C._cuda_clearCublasWorkspaces()
            left.append(in_use() - before)
            context.note(engine_mib=(during - before) >> 20, left_kib=[size >> 10 for size in left])
    expect(given.count(given[0]) == ROUNDS, f"the engines answer differently: {given}")
    growth = left[-1] - left[1]
    expect(growth <= GROWTH_BYTES, f"{growth} bytes more are in use after engine {ROUNDS} than after engine 2")
    expect(left[0] <= WORKSPACE_BYTES, f"{left[0]} bytes stay in use after the first engine")
