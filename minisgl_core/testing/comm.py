"""Checks of the role ``comm``: real ranks, one process each."""

from __future__ import annotations

import base64
import json
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from unittest import SkipTest

from minisgl_core.registry.query import Requirement

from .attention_checks import DTYPES
from .backend_under_test import names_of
from .check import Check, Result
from .collect import collect
from .comm_ranks import RankTask, run_collectives
from .compare import Mismatch

if TYPE_CHECKING:
    from minisgl_core.plugin_api import Caps

    from .backend_under_test import BackendUnderTest
    from .device_fixture import DeviceFixture

__all__ = ["CommCheck", "comm_checks"]

TIMEOUT_S = 180.0


@dataclass(frozen=True, kw_only=True, repr=False)
class CommCheck(Check):
    """Every collective between ``ranks`` ranks. A single rank runs in this process, because it cannot block."""

    ranks: int = 2
    dtypes: tuple[str, ...] = ("float32",)
    capture: bool = False

    def requirement(self, fixture: DeviceFixture) -> Requirement:
        return Requirement(device=fixture.facts, dtype=self.dtypes[0], capture=self.capture and self.ranks > 1)

    def run(self, under_test: BackendUnderTest, fixture: DeviceFixture) -> Result:
        if not fixture.facts.about.on_host and fixture.facts.count < self.ranks:
            raise SkipTest(f"needs {self.ranks} GPUs, {fixture.facts.count} are here")
        task = RankTask(under_test, fixture.facts, 0, self.ranks, _free_port(), self.dtypes, self.capture)
        found = run_collectives(task, fixture) if self.ranks == 1 else _launch(task)
        if found:
            raise Mismatch("; ".join(found))
        return Result()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _launch(task: RankTask) -> list[str]:
    """Run every rank in a separate process; returns their failures."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from minisgl_core.testing.comm_ranks import main; main()"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(task.size)
    ]
    for rank, process in enumerate(processes):
        assert process.stdin is not None
        process.stdin.write(base64.b64encode(pickle.dumps(replace(task, rank=rank))) + b"\n")
        process.stdin.flush()
    complaints = []
    for rank, process in enumerate(processes):
        try:
            out, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
            out, errors = process.communicate()
            complaints.append(f"rank {rank}: did not end within {TIMEOUT_S:g} s")
            continue
        if process.returncode:
            last = (errors.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            complaints.append(f"rank {rank}: exit code {process.returncode}: {last}")
        else:
            complaints += [f"rank {rank}: {text}" for text in json.loads(out.decode().strip().splitlines()[-1])]
    return complaints


def comm_checks(under_test: BackendUnderTest, fixture: DeviceFixture, quick: bool) -> list[Check]:
    """One rank, two, and (unless quick) three; dtypes and capture just outside the caps."""
    return collect(under_test, fixture, lambda caps: _of_caps(caps, quick), _beyond)


def _of_caps(caps: Caps, quick: bool) -> list[CommCheck]:
    # Graph runners take seconds to import, on each rank.
    capture = caps.graph != "never" and not quick
    dtypes = names_of(caps.dtypes, DTYPES)
    sizes = (1, 2) if quick else (1, 2, 3)
    return [CommCheck(name=f"ranks={n}", ranks=n, dtypes=dtypes, capture=capture) for n in sizes]


def _beyond(caps: Caps) -> Iterator[CommCheck]:
    dtypes = names_of(caps.dtypes, DTYPES)
    for name in DTYPES:
        if name not in dtypes:
            yield CommCheck(name=f"outside/dtype={name}", ranks=1, dtypes=(name,), outside=True)
    if caps.graph == "never":
        yield CommCheck(name="outside/replay", dtypes=dtypes[:1], capture=True, outside=True)
