"""Tensor-parallel ranks as plain processes, each with its own engine and scheduler, for tests that compare them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from minisgl_core.core import SamplingParams
from minisgl_core.distributed import DistributedInfo
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.scheduler import NewReq, Scheduler

__all__ = ["tokens_of_each_rank"]

Tokens = dict[int, list[int]]
"""By uid."""


def tokens_of_each_rank(
    size: int, path: Path, prompts: Sequence[Sequence[int]], params: SamplingParams, **settings: Any
) -> list[Tokens]:
    """What each of ``size`` ranks thinks was answered to the same prompts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results: Any = context.SimpleQueue()
    arguments = (size, port, str(path), prompts, params, settings, results)
    ranks = [context.Process(target=_run, args=(rank, *arguments), daemon=True) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
        assert rank.exitcode == 0
    return [tokens for _, tokens in sorted(results.get() for _ in ranks)]


def _run(
    rank: int,
    size: int,
    port: int,
    path: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    settings: dict[str, Any],
    results: Any,
) -> None:
    torch.set_num_threads(1)
    tp = {"tp_info": DistributedInfo(rank, size), "distributed_port": port}
    engine = Engine(EngineConfig(path, device="cpu", dtype=torch.float32, progress=False, **tp, **settings))
    scheduler = Scheduler(engine)
    scheduler.apply([NewReq(uid, np.array(prompt, dtype=np.int32), params) for uid, prompt in enumerate(prompts)])
    tokens: Tokens = {uid: [] for uid in range(len(prompts))}
    while scheduler.has_work:
        for out in scheduler.step():
            assert out.token is not None
            tokens[out.uid].append(out.token)
    engine.shutdown()
    results.put((rank, tokens))
