"""The host's own time per decode step: scheduler and engine are real, the model's decode is a stub that costs nothing.

    python benchmarks/host_step.py [--mode steady|offline|churn] [--batch N ...] [--page-size S] [--profile]
    python benchmarks/host_step.py --model FOLDER        # a real model's graphs (random weights): for a GPU
    python benchmarks/host_step.py --wait 0 1 8 30       # as if each step's tokens arrived this many milliseconds later
    python benchmarks/host_step.py --json FILE           # keep every figure, with machine, versions and plan

It is the floor that a device's step time meets: while a step runs, the host has this much to do for the next one. In
``steady`` decode nothing changes. In ``offline`` N requests of random lengths start together and end one by one, so
that rows leave and slots run out. In ``churn`` twice as many more wait for their rows. Times are of this thread's CPU,
in microseconds; only steps that launch a decode pass count. With a model they are wall times, without the waiting for
tokens, and the launch of the graph is reported separately.
"""

from __future__ import annotations

import cProfile
import itertools
import json
import platform
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from commandline import Parser, about, amount, keep, need_gpu, output, positive, run

from minisgl_core.core import Batch, SamplingParams
from minisgl_core.engine import Engine, EngineConfig, ForwardOutput
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
    """A graph runner whose replay takes no time on the host."""

    clock = staticmethod(time.thread_time_ns)
    launching = waiting = 0

    def __init__(self, engine: Engine, max_batch: int) -> None:
        self._logits = torch.zeros(max_batch, engine.vocab_size)
        self._tokens = torch.ones(max_batch, dtype=torch.int32)
        self.replays = 0
        engine.graph_runner.close()
        engine.graph_runner = self

    def pad_batch(self, batch: Batch) -> None:
        batch.padded_size = batch.size

    def can_replay(self, batch: Batch) -> bool:
        return batch.is_decode

    def replay(self, batch: Batch) -> StepOutput:
        self.replays += 1
        return StepOutput(self._logits[: batch.padded_size], self._tokens[: batch.padded_size])

    def close(self) -> None:
        pass


class TimedGraphs:
    """An engine's own graph runner, and its waits for tokens, with the nanoseconds that they took."""

    clock = staticmethod(time.perf_counter_ns)

    def __init__(self, engine: Engine) -> None:
        runner, self._finish = engine.graph_runner, engine.finish
        self.pad_batch, self.can_replay, self.close = runner.pad_batch, runner.can_replay, runner.close
        self._replay = runner.replay
        self.replays = self.launching = self.waiting = 0
        engine.graph_runner = self
        engine.finish = self._finish_timed  # type: ignore[method-assign]

    def replay(self, batch: Batch) -> StepOutput:
        begin = self.clock()
        out: StepOutput = self._replay(batch)
        self.launching += self.clock() - begin
        self.replays += 1
        return out

    def _finish_timed(self, batch: Batch, step: StepOutput) -> ForwardOutput:
        out = self._finish(batch, step)

        def wait() -> None:
            begin = self.clock()
            out.copied.synchronize()
            self.waiting += self.clock() - begin

        return out._replace(copied=SimpleNamespace(synchronize=wait))


@dataclass(frozen=True)
class HostTime:
    """Microseconds of the decode steps of one run."""

    median: float
    mean: float
    launching: float
    """Of the mean: inside the graph runner"""
    steps: int
    wait_ms: float
    """That the thread slept before each step, as it does while a device computes"""
    plan: Mapping[str, str]
    """What serves each entry of the plan; without a model the stub replaces its graphs"""


def host_microseconds(batch: int) -> float:
    """Median microseconds of one steady scheduler step with ``batch`` running Reqs, the engine's host work included."""
    return measure("steady", batch).median


def measure(
    mode: str,
    batch: int,
    page_size: int = 1,
    model: str | None = None,
    profile: cProfile.Profile | None = None,
    wait_ms: float = 0.0,
) -> HostTime:
    """Run the mode with ``batch`` rows; ``model``: a folder, None = none."""
    outputs = _output_lens(mode, batch)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(GEOMETRY))
        config = EngineConfig(
            model_path=model or folder,
            device="auto" if model else "cpu",
            max_running_req=batch,
            max_seq_len_override=PROMPT_LEN + max(outputs) + 32,
            num_page_override=batch * (PROMPT_LEN + max(outputs) + 128) // page_size,
            page_size=page_size,
            dummy_weights=True,
            progress=False,
        )
        engine = Engine(config)
    graphs = TimedGraphs(engine) if model else InstantGraphs(engine, batch)
    try:
        steps = STEPS if mode == "steady" else None
        times, launching = _run(Scheduler(engine), graphs, outputs, steps, profile, wait_ms / 1000)
        plan = engine.plan.summary()
    finally:
        engine.shutdown()
    launching /= len(times)
    return HostTime(statistics.median(times), statistics.fmean(times), launching, len(times), wait_ms, plan)


def _output_lens(mode: str, batch: int) -> list[int]:
    if mode == "steady":
        return [WARM_STEPS + STEPS + 16] * batch
    draw = random.Random(0)
    return [draw.randint(SHORTEST, LONGEST) for _ in range(batch * (3 if mode == "churn" else 1))]


def _run(
    scheduler: Scheduler,
    graphs: InstantGraphs | TimedGraphs,
    outputs: list[int],
    steps: int | None,
    profile: cProfile.Profile | None,
    wait_s: float,
) -> tuple[list[float], float]:
    """Serve requests of these output lengths; the first steps warm up, and no more than ``steps`` are measured.

    Microseconds of each step, and of the graph runner in all of them.
    """
    prompts = np.random.default_rng(0).integers(1, 1000, (len(outputs), PROMPT_LEN), dtype=np.int32)
    scheduler.apply(
        NewReq(uid, prompts[uid], SamplingParams(max_tokens=count, ignore_eos=True))
        for uid, count in enumerate(outputs)
    )
    for _ in range(WARM_STEPS):
        scheduler.step()
    times: list[float] = []
    launching = 0.0
    while scheduler.has_work and len(times) != steps:
        if wait_s:
            time.sleep(wait_s)
        before = (graphs.replays, graphs.launching, graphs.waiting)
        if profile is not None:
            profile.enable()
        begin = graphs.clock()
        scheduler.step()
        taken = graphs.clock() - begin
        if profile is not None:
            profile.disable()
        if graphs.replays > before[0]:
            times.append((taken - graphs.waiting + before[2]) / 1000)
            launching += (graphs.launching - before[1]) / 1000
    if not times:
        raise SystemExit("no step was replayed: this engine captures no graphs")
    return times, launching


def cpu_name() -> str:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def context(model: str | None) -> dict[str, Any]:
    """What the figures of one call depend on, besides plan and :func:`commandline.about`."""
    return {
        "cpu": cpu_name(),
        "model": Path(model).resolve().name if model else None,
        "microseconds": "wall time without the waiting for tokens" if model else "CPU time of the thread",
    }


def main() -> None:
    """Every mode with every requested batch size."""
    parser = Parser(__doc__)
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--page-size", type=positive, default=1)
    parser.add_argument("--wait", type=amount, nargs="+", default=[0.0], help="milliseconds of sleep before each step")
    parser.add_argument("--model", help="a model's folder; its config.json is enough")
    parser.add_argument("--json", type=output, help="write raw results here, anew after each of them")
    parser.add_argument("--profile", action="store_true", help="where the time goes, function by function")
    options = parser.parse_args()
    if options.model:
        need_gpu()
    torch.set_num_threads(1)
    content: dict[str, Any] = {**about(options), **context(options.model), "rows": []}
    for mode in options.mode or MODES:
        for batch, wait in itertools.product(options.batch, options.wait):
            profile = cProfile.Profile() if options.profile else None
            found = measure(mode, batch, options.page_size, options.model, profile, wait)
            content["rows"].append({"mode": mode, "batch": batch, "page_size": options.page_size, **asdict(found)})
            if options.json:
                keep(content, options.json)
            launching = f", {found.launching:.1f} us of it launching" if options.model else ""
            print(
                f"{mode:8} batch {batch:4}, wait {wait:g} ms: median {found.median:6.1f} us, "
                f"mean {found.mean:6.1f} us{launching}, {found.steps} steps",
                flush=True,
            )
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    raise SystemExit(run(main))
