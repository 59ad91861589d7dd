"""The host's own time per steady decode step: scheduler and engine are real, the model is a stub that costs nothing.

    python benchmarks/host_step.py

It is the floor that a device's step time meets: while a step runs, the host has this much to do for the next one.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl_core.core import Batch, SamplingParams
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.plugin_api import StepOutput
from minisgl_core.scheduler import NewReq, Scheduler

WARM_STEPS, STEPS, PROMPT_LEN = 20, 300, 8
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
    "max_position_embeddings": 1024,
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

    def pad_batch(self, batch: Batch) -> None:
        batch.padded_size = batch.size

    def can_replay(self, batch: Batch) -> bool:
        return batch.is_decode

    def replay(self, batch: Batch) -> StepOutput:
        return StepOutput(self._logits[: batch.padded_size], self._tokens[: batch.padded_size])

    def close(self) -> None:
        pass


def host_microseconds(batch: int) -> float:
    """Median microseconds of one scheduler step with ``batch`` running Reqs, the engine's host work included."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(GEOMETRY))
        config = EngineConfig(
            model_path=folder,
            device="cpu",
            max_running_req=batch,
            max_seq_len_override=PROMPT_LEN + WARM_STEPS + STEPS + 32,
            page_size=1,
            cache="naive",
            dummy_weights=True,
            progress=False,
        )
        engine = Engine(config)
    instant: Any = InstantGraphs(batch, engine.vocab_size)
    engine.graph_runner.close()
    engine.graph_runner = instant
    scheduler = Scheduler(engine)
    params = SamplingParams(max_tokens=WARM_STEPS + STEPS + 16, ignore_eos=True)
    prompt = np.arange(1, 1 + PROMPT_LEN, dtype=np.int32)
    scheduler.apply([NewReq(uid, prompt, params) for uid in range(batch)])
    for _ in range(WARM_STEPS):
        scheduler.step()
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter_ns()
        outs = scheduler.step()
        times.append(time.perf_counter_ns() - begin)
        if len(outs) != batch:
            raise SystemExit(f"a steady step gave {len(outs)} tokens for {batch} Reqs")
    engine.shutdown()
    return statistics.median(times) / 1000


if __name__ == "__main__":
    for size in (8, 64, 256):
        print(f"batch {size}: {host_microseconds(size):.0f} us per step")
