"""Collectives inside a captured step, two ranks over gloo."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from minisgl_cpu_sim.graph import EmulatedGraph, strict_check

RANKS = 2


def _rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    x = torch.full((2, 3), rank + 1.0)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        total = x * 2
        dist.all_reduce(total)
        parts = [torch.empty(2, 3) for _ in range(RANKS)]
        dist.all_gather(parts, total + rank)
        return total, torch.cat(parts, -1)

    with torch.inference_mode():
        graph = EmulatedGraph.capture(step, strict=True)
        x.mul_(10)
        for replayed in (graph.replay(), strict_check(graph, step)):
            assert torch.equal(replayed[0], torch.full((2, 3), 60.0))
            assert torch.equal(replayed[1], torch.tensor([60.0, 61.0]).repeat_interleave(3).expand(2, 6))
    assert [op.name for op in graph.ops if op.name.startswith("c10d")] == [
        "c10d.allreduce_.default",
        "c10d.allgather_.default",
    ]
    dist.destroy_process_group()


def test_collectives_are_replayed(tmp_path: Path) -> None:
    spawn(_rank, args=(str(tmp_path / "store"),), nprocs=RANKS)
