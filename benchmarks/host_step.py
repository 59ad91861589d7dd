"""The host's own time per decode step: scheduler and engine are real, the model's decode is a stub that costs nothing.

    python benchmarks/host_step.py [--mode steady|offline|churn] [--batch N ...] [--page-size S] [--profile]

It is the floor that a device's step time meets: while a step runs, the host has this much to do for the next one. In
``steady`` decode nothing changes. In ``offline`` N requests of random lengths start together and end one by one, so
that rows leave and slots run out. In ``churn`` twice as many more wait for their rows. Times are of this thread's CPU,
in microseconds; only steps that launch a decode pass count.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl_core.core import Batch, SamplingParams
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.plugin_api import StepOutput
from minisgl_core.scheduler import NewReq, Scheduler

WARM_STEPS, STEPS, PROMPT_LEN = 20, 300, 8
SHORTEST, LONGEST = 100, 1024
"""Tokens that a request of random length generates."""
MODES = ("steady", "offline", "churn")
GEOMETRY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


class InstantGraphs:
    """Stands for a graph runner whose replay takes no time on the host."""

    def __init__(self, max_batch: int, vocab_size: int) -> None:
        self._logits = torch.zeros(max_batch, vocab_size)
        self._tokens = torch.ones(max_batch, dtype=torch.int32)
        self.replays = 0

    def pad_batch(self, batch: Batch) -> None:
        batch.padded_size = batch.size

    def can_replay(self, batch: Batch) -> bool:
        return batch.is_decode

    def replay(self, batch: Batch) -> StepOutput:
        self.replays += 1
        return StepOutput(self._logits[: batch.padded_size], self._tokens[: batch.padded_size])

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class HostTime:
    """Microseconds of the decode steps of one run."""

    median: float
    mean: float
    steps: int


def host_microseconds(batch: int) -> float:
    """Median microseconds of one steady scheduler step with ``batch`` running Reqs, the engine's host work included."""
    return measure("steady", batch).median


def measure(mode: str, batch: int, page_size: int = 1, profile: cProfile.Profile | None = None) -> HostTime:
    """Run the mode with ``batch`` rows."""
    outputs = _output_lens(mode, batch)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(GEOMETRY))
        config = EngineConfig(
            model_path=folder,
            device="cpu",
            max_running_req=batch,
            max_seq_len_override=PROMPT_LEN + max(outputs) + 32,
            num_page_override=batch * (PROMPT_LEN + max(outputs) + 128) // page_size,
            page_size=page_size,
            dummy_weights=True,
            progress=False,
        )
        engine = Engine(config)
    graphs = InstantGraphs(batch, engine.vocab_size)
    engine.graph_runner.close()
    engine.graph_runner = graphs
    times = _run(Scheduler(engine), graphs, outputs, STEPS if mode == "steady" else None, profile)
    engine.shutdown()
    return HostTime(statistics.median(times), statistics.fmean(times), len(times))


def _output_lens(mode: str, batch: int) -> list[int]:
    if mode == "steady":
        return [WARM_STEPS + STEPS + 16] * batch
    draw = random.Random(0)
    return [draw.randint(SHORTEST, LONGEST) for _ in range(batch * (3 if mode == "churn" else 1))]


def _run(
    scheduler: Scheduler, graphs: Any, outputs: list[int], steps: int | None, profile: cProfile.Profile | None
) -> list[float]:
    """Microseconds of each decode step after the warm-up."""
    prompts = np.random.default_rng(0).integers(1, GEOMETRY["vocab_size"], (len(outputs), PROMPT_LEN), dtype=np.int32)
    scheduler.apply(
        NewReq(uid, prompts[uid], SamplingParams(max_tokens=count, ignore_eos=True))
        for uid, count in enumerate(outputs)
    )
    for _ in range(WARM_STEPS):
        scheduler.step()
    times: list[float] = []
    while scheduler.has_work and len(times) != steps:
        replays = graphs.replays
        if profile is not None:
            profile.enable()
        begin = time.thread_time_ns()
        scheduler.step()
        taken = time.thread_time_ns() - begin
        if profile is not None:
            profile.disable()
        if graphs.replays > replays:
            times.append(taken / 1000)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="where the time goes, function by function")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for mode in arguments.mode or MODES:
        for batch in arguments.batch:
            profile = cProfile.Profile() if arguments.profile else None
            found = measure(mode, batch, arguments.page_size, profile)
            print(
                f"{mode:8} batch {batch:4}: median {found.median:6.1f} us, mean {found.mean:6.1f} us per step, "
                f"{found.steps} steps",
                flush=True,
            )
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
