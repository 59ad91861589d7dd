"""graph:cuda on a stand-in for the device: what a replay does, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl_core.core import Batch
from minisgl_core.plugin_api import GraphSetup, StepOutput
from minisgl_cuda.graph import WARM_UPS, CudaGraphRunner

MODES: Any = ("greedy", "random")


class Device:
    """A platform and a graph host. A captured step is replayed as a call of the same function; ``planned`` is what the
    host plan of a batch leaves for it.
    """

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.planned = torch.zeros(1)

    # The host.

    def make_capture_batch(self, size: int, mode: Any) -> Batch:
        return Batch(reqs=[], phase="decode", padded_size=size, mode=mode, captured=True)

    def step(self, batch: Batch) -> StepOutput:
        self.log.append(("step", batch.padded_size, batch.mode))
        return StepOutput(self.planned.expand(batch.padded_size, 3).clone(), torch.zeros(batch.padded_size))

    def prepare_replay(self, batch: Batch) -> None:
        self.log.append("plan")
        self.planned.fill_(batch.scratch["plan"])

    # The platform.

    def synchronize(self) -> None:
        self.log.append("wait")

    def capture(self, step: Callable[[], StepOutput], pool: Any) -> tuple[Any, StepOutput, Any]:
        output = step()

        @torch.inference_mode()
        def replay() -> None:
            self.log.append("replay")
            output.logits.copy_(step().logits)

        graph = SimpleNamespace(replay=replay, close=lambda: self.log.append("close"))
        return graph, output, pool or object()


@pytest.fixture
def made() -> tuple[CudaGraphRunner, Device]:
    device: Any = Device()
    runner = CudaGraphRunner(GraphSetup(device, torch.device("cpu"), device, (1, 4), MODES, 64))
    runner.capture()
    return runner, device


def decode_batch(size: int, mode: str, plan: float) -> Any:
    return Batch(reqs=[None] * size, phase="decode", mode=mode, scratch={"plan": plan})  # type: ignore[list-item]


def test_the_host_plan_of_a_batch_is_made_before_its_replay(made: tuple[CudaGraphRunner, Device]) -> None:
    runner, device = made
    for plan in (5.0, 6.0):
        batch = decode_batch(3, "random", plan)
        runner.pad_batch(batch)
        assert batch.padded_size == 4 and runner.can_replay(batch)
        device.log.clear()
        assert runner.replay(batch).logits.tolist() == [[plan] * 3] * 4
        assert device.log == ["plan", "replay", ("step", 4, "random")]


def test_every_size_and_mode_is_recorded_after_its_warm_up_largest_first(made: tuple[CudaGraphRunner, Device]) -> None:
    _, device = made
    expected: list[Any] = []
    for key in ((4, "greedy"), (4, "random"), (1, "greedy"), (1, "random")):
        expected += [("step", *key)] * WARM_UPS + ["wait", ("step", *key)]
    assert device.log == expected


def test_what_was_not_recorded_is_not_replayed(made: tuple[CudaGraphRunner, Device]) -> None:
    runner, device = made
    for size, mode in ((5, "greedy"), (2, "filtered")):
        batch = decode_batch(size, mode, 0.0)
        runner.pad_batch(batch)
        assert not runner.can_replay(batch)
    prefill = decode_batch(1, "greedy", 0.0)
    prefill.phase = "prefill"
    runner.pad_batch(prefill)
    assert not runner.can_replay(prefill)
    device.log.clear()
    runner.close()
    assert device.log == ["close"] * 4
