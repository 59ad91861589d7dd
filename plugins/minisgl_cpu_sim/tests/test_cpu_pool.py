"""The kernels' own threads: every item once, from any caller, also after a fork."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from minisgl_core.plugin_api import LinearSetup
from minisgl_cpu_sim.native.linear import NativeLinear

BACKEND = NativeLinear(LinearSetup(device=torch.device("cpu"), dtype=torch.float32, max_tokens=64))


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def test_calls_from_several_threads_at_once() -> None:
    inputs = [(torch.randn(1 + i % 5, 64), torch.randn(1600, 64)) for i in range(40)]
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda pair: BACKEND.forward(*pair), inputs))
    for (x, weight), out in zip(inputs, results, strict=True):
        torch.testing.assert_close(out, x @ weight.t(), atol=1e-4, rtol=1e-4)


def test_workers_that_fell_asleep_are_woken() -> None:
    x, weight = torch.randn(2, 64), torch.randn(1600, 64)
    expected = BACKEND.forward(x, weight)
    for pause in (0.0, 0.001, 0.01):
        time.sleep(pause)
        assert torch.equal(BACKEND.forward(x, weight), expected)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*")
def test_a_forked_child_starts_its_own_threads() -> None:
    x, weight = torch.randn(2, 64), torch.randn(1600, 64)
    expected = BACKEND.forward(x, weight)
    child = os.fork()
    if child == 0:  # no assertion may unwind into pytest here
        os._exit(0 if torch.equal(BACKEND.forward(x, weight), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
