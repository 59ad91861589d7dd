"""One rank of a communication check. All ranks make the same calls in the same order, or they would hang."""

from __future__ import annotations

import base64
import json
import pickle
import sys
from dataclasses import dataclass
from typing import Any

import torch

from minisgl_core.plugin_api import CommSetup
from minisgl_core.registry import DeviceFacts

from .backend_under_test import BackendUnderTest
from .compare import close, expect, fresh, same
from .device_fixture import DeviceFixture, dtype_named

__all__ = ["RankTask", "main", "run_collectives"]

REPEATS = 10


@dataclass(frozen=True)
class RankTask:
    """The identity of this rank, and its task."""

    under_test: BackendUnderTest
    device: DeviceFacts
    rank: int
    size: int
    port: int
    dtypes: tuple[str, ...]
    capture: bool


def main() -> None:
    """Run one task from standard input; write failures as JSON to standard output."""
    task: RankTask = pickle.loads(base64.b64decode(sys.stdin.readline()))
    torch.set_num_threads(1)
    fixture = DeviceFixture(task.device, task.rank)
    with fixture.active():
        print(json.dumps(run_collectives(task, fixture)))


def run_collectives(task: RankTask, fixture: DeviceFixture) -> list[str]:
    """Run all checks, continuing after failures; returns ``check: what is wrong``."""
    address = f"tcp://127.0.0.1:{task.port}" if task.size > 1 else ""
    comm = task.under_test.build(CommSetup(fixture.device, task.rank, task.size, address, 60.0))
    complaints = []
    for check in (_all_gather, _all_reduce, _check_equal, *([_replay] if task.capture and task.size > 1 else [])):
        try:
            check(comm, task, fixture)
        except Exception as error:
            complaints.append(f"{check.__name__.strip('_')}: {error}")
        comm.barrier()
    comm.close()
    return complaints


def _data(task: RankTask, fixture: DeviceFixture, seed: int, *shape: int) -> list[torch.Tensor]:
    """The data of each rank, which every rank can compute. Small integers add up exactly in every dtype."""
    random = fixture.generator(seed)
    made = torch.randint(-8, 9, (task.size, *shape), generator=random)
    return list(made.to(fixture.device, torch.float32))


def _all_gather(comm: Any, task: RankTask, fixture: DeviceFixture) -> None:
    for name in task.dtypes:
        for rows, columns in ((1, 8), (2, 4), (17, 33)):
            parts = [part.to(dtype_named(name)) for part in _data(task, fixture, rows, rows, columns)]
            mine = parts[task.rank].clone()
            got = comm.all_gather(mine)
            same(got, torch.cat(parts, dim=-1), f"({rows}, {columns}) of {name}, the ranks' columns side by side")
            same(mine, parts[task.rank], "the input")
            if task.size > 1:
                fresh(got, {"the input": mine}, "the result")


def _all_reduce(comm: Any, task: RankTask, fixture: DeviceFixture) -> None:
    for name in task.dtypes:
        for number in range(REPEATS):
            rows = (1, 3, 40)[number % 3]
            parts = _data(task, fixture, number, rows, 576)
            x = parts[task.rank].clone().to(dtype_named(name))
            got = comm.all_reduce(x)
            expect(got is x, "the sum is returned in another tensor than x")
            close(x, torch.stack(parts).sum(0).to(torch.float64), f"the sum of {name}, call {number}")


def _check_equal(comm: Any, task: RankTask, fixture: DeviceFixture) -> None:
    comm.check_equal("plan", "the same everywhere")
    if task.size == 1:
        return
    try:
        comm.check_equal("plan", f"digest-{task.rank}")
    except Exception as error:
        missing = [rank for rank in range(task.size) if f"digest-{rank}" not in str(error)]
        expect(not missing, f"the error does not show what ranks {missing} have: {error}")
        expect("plan" in str(error), f"the error does not say what differs: {error}")
        return
    expect(False, "texts that differ are taken for equal")


def _replay(comm: Any, task: RankTask, fixture: DeviceFixture) -> None:
    """Sum and gather in one captured step whose inputs change between replays."""
    x = torch.zeros(4, 64, dtype=dtype_named(task.dtypes[0]), device=fixture.device)

    def step() -> tuple[torch.Tensor, ...]:
        return comm.all_reduce(x.clone()), comm.all_gather(x)

    captured = fixture.capture(step)
    for number in range(3):
        parts = _data(task, fixture, 100 + number, 4, 64)
        x.copy_(parts[task.rank])
        captured.replay()
        fixture.platform.synchronize()
        total, gathered = captured.outputs
        close(total, torch.stack(parts).sum(0).to(torch.float64), f"replay {number}: the sum")
        same(gathered, torch.cat(parts, dim=-1).to(x.dtype), f"replay {number}: the gathered columns")
    captured.close()
