"""Cases of the role ``comm``: real ranks, one process each."""

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

from minisgl_core.registry.query import Need

from .attention_cases import DTYPES
from .case import Case, Finding, collect
from .comm_ranks import RankTask, run_checks
from .compare import Mismatch
from .subject import names_of

if TYPE_CHECKING:
    from minisgl_core.plugin_api import Caps

    from .rig import Rig
    from .subject import Subject

__all__ = ["CommCase", "comm_cases"]

TIMEOUT_S = 180.0


@dataclass(frozen=True, kw_only=True, repr=False)
class CommCase(Case):
    """Every collective between ``ranks`` ranks; with one rank, in this process: nothing is there to wait for."""

    ranks: int = 2
    dtypes: tuple[str, ...] = ("float32",)
    capture: bool = False

    def need(self, rig: Rig) -> Need:
        return Need(device=rig.facts, dtype=self.dtypes[0], capture=self.capture and self.ranks > 1)

    def run(self, subject: Subject, rig: Rig) -> Finding:
        if rig.facts.kind == "cuda" and rig.facts.count < self.ranks:
            raise SkipTest(f"needs {self.ranks} GPUs, {rig.facts.count} are here")
        task = RankTask(subject, rig.facts, 0, self.ranks, _free_port(), self.dtypes, self.capture)
        found = run_checks(task, rig) if self.ranks == 1 else _launch(task)
        if found:
            raise Mismatch("; ".join(found))
        return Finding()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _launch(task: RankTask) -> list[str]:
    """Run every rank in a process of its own; what they complain about."""
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


def comm_cases(subject: Subject, rig: Rig, quick: bool) -> list[CommCase]:
    """One rank, two, and (unless quick) three; dtypes and capture just outside."""
    return collect(subject, rig, lambda box: _of_box(box, quick), _beyond)


def _of_box(box: Caps, quick: bool) -> list[CommCase]:
    # Recorders take seconds to import, on each rank.
    capture = box.graph != "never" and not quick
    dtypes = names_of(box.dtypes, DTYPES)
    sizes = (1, 2) if quick else (1, 2, 3)
    return [CommCase(name=f"ranks={n}", ranks=n, dtypes=dtypes, capture=capture) for n in sizes]


def _beyond(box: Caps) -> Iterator[CommCase]:
    dtypes = names_of(box.dtypes, DTYPES)
    for name in DTYPES:
        if name not in dtypes:
            yield CommCase(name=f"outside/dtype={name}", ranks=1, dtypes=(name,), outside=True)
    if box.graph == "never":
        yield CommCase(name="outside/replay", dtypes=dtypes[:1], capture=True, outside=True)
