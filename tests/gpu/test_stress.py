"""256 random requests at once, under every setting: each is answered as if it were alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from support.gpu.backends import AttentionPair, attention_pairs
from support.gpu.check import Context, expect
from support.gpu.collect import context_of
from support.gpu.stress import EXACT, HALF, serve_and_compare

pytestmark = pytest.mark.gpu
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "no-graphs": {"cuda_graph_max_bs": 0},
    "no-overlap": {"overlap": False},
    "neither": {"cuda_graph_max_bs": 0, "overlap": False},
    "page-1": {"page_size": 1},
    "page-64": {"page_size": 64},
    "page-256": {"page_size": 256},
    "chunks-of-32": {"max_prefill_tokens": 32},
    "no-prefix-cache": {"cache": "naive"},
    "small-pool": {},
    "launch-blocking": {},
}
CASES: Mapping[str, tuple[int, ...]] = {
    "default": (43, 46, 62, 65),
    "no-graphs": (65,),
    "no-overlap": (62,),
    "chunks-of-32": (27, 64),
    "small-pool": (63,),
    "launch-blocking": (62,),
}
LIMIT_S = 400.0
"""The first check answers all requests alone, and the others wait for it."""
TIMES = {"default": 3}
"""Runs in a row, to give races a chance; one for all others and with ``--quick``"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """float32 under each setting and with blocking launches; bfloat16 for each pair of attention backends."""
    context = context_of(metafunc.config)
    cost = 6.0 if context.quick else 20.0
    costs = {"default": cost * (1 if context.quick else TIMES["default"]) + 20.0, "small-pool": 1.5 * cost,
             "launch-blocking": 2 * cost}  # fmt: skip
    sessions = {"small-pool": "stress/small-pool", "launch-blocking": "stress/launch-blocking"}
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
    metafunc.parametrize("setting", [
        *(pytest.param(name, marks=pytest.mark.check(
            seconds=costs.get(name, cost), session=sessions.get(name, "stress"), limit_s=LIMIT_S,
            cases=CASES.get(name, ()), env=blocking if name == "launch-blocking" else {},
        )) for name in SETTINGS),
        *(pytest.param(pair, id=pair.name, marks=pytest.mark.check(
            seconds=2 * cost, session="stress/bf16", quick=pair.main, cases=(62, 64), limit_s=LIMIT_S,
            needs=pair.needs,
        )) for pair in attention_pairs(context)),
    ])  # fmt: skip


def test_stress(setting: str | AttentionPair, context: Context) -> None:
    """In float32 with attention:torch tokens are equal, but for near-ties; requests drive each other out of a small
    pool. In bfloat16 each pair runs with overlap and without.
    """
    if isinstance(setting, AttentionPair):
        half: dict[str, Any] = {"dtype": "bfloat16", "backends": {"attention": setting.backends}}
        serve_and_compare(context, HALF, [half, {**half, "overlap": False}])
    elif setting == "small-pool":
        running = 4 if context.tiny else 16
        small = {"dtype": "float32", "max_running_req": running, "pool_tokens": 32 * running}
        preemptions = serve_and_compare(context, EXACT, [small], growing=True)
        expect(preemptions > 0, "the pool was not small enough: no request was preempted")
    else:
        times = 1 if context.quick else TIMES.get(setting, 1)
        serve_and_compare(context, EXACT, [{"dtype": "float32", **SETTINGS[setting]}] * times)
