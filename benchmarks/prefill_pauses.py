"""Equal prefill calls one after the other, and what happened in each: finds the cause of a rare pause.

    python benchmarks/prefill_pauses.py                                      # tiny, on any machine
    python benchmarks/prefill_pauses.py --model DIR --prompts 64 --tokens 1024 --json pauses.json

Each call of ``LLM.generate`` answers the same prompts with one token, on an empty prefix cache. With its wall
time it reports the runs of Python's garbage collector and their durations, the allocator's retries and allocations (on
a GPU), the process's context switches and page faults, and the modules that were imported. Weights are random.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from commandline import Parser, about, keep, output, positive, run

from minisgl_core.core import SamplingParams
from minisgl_core.llm import LLM

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
ALLOCATOR = ("num_alloc_retries", "num_device_alloc", "num_device_free", "num_ooms")
USAGE = {"voluntary_switches": "ru_nvcsw", "forced_switches": "ru_nivcsw", "major_faults": "ru_majflt"}


class Collections:
    """The garbage collector's runs: (generation, milliseconds, collected objects)."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self._begun = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.perf_counter()
        else:
            ms = (time.perf_counter() - self._begun) * 1e3
            self.seen.append({"generation": info["generation"], "ms": ms, "collected": info["collected"]})

    def take(self) -> list[dict[str, float]]:
        seen, self.seen = self.seen, []
        return seen


def counters() -> dict[str, int]:
    """Numbers that only grow; a call's own are the differences."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found = {name: int(getattr(usage, field)) for name, field in USAGE.items()}
    found["modules"] = len(sys.modules)
    if torch.cuda.is_available():
        stats = torch.cuda.memory_stats()
        found |= {name: int(stats.get(name, 0)) for name in ALLOCATOR}
    return found


def measure(llm: LLM, prompts: list[list[int]], calls: int) -> list[dict[str, Any]]:
    """One row per call, the first ones included: they show what a start leaves to do."""
    collections, rows = Collections(), []
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    gc.callbacks.append(collections)
    try:
        for _ in range(calls):
            llm.clear_cache()
            collections.take()
            before, begun = counters(), time.perf_counter()
            llm.generate(prompts, params, progress=False)
            ms = (time.perf_counter() - begun) * 1e3
            after = counters()
            changes = {name: after[name] - before[name] for name in after}
            rows.append({"ms": ms, "collections": collections.take(), **changes})
    finally:
        gc.callbacks.remove(collections)
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The median, the slowest, and what was different in the slow ones."""
    times = [row["ms"] for row in rows]
    middle = statistics.median(times)
    print(f"{len(rows)} calls: median {middle:.1f} ms, slowest {max(times):.1f} ms, {max(times) / middle:.2f} x")
    for number, row in enumerate(rows):
        if row["ms"] > 1.3 * middle or any(one["generation"] == 2 for one in row["collections"]):
            print(f"call {number}: {json.dumps(row)}")


def main() -> None:
    """Measure, print, and write the JSON if asked."""
    parser = Parser(__doc__)
    parser.add_argument("--model", type=Path, help="a model folder (default: a tiny one)")
    parser.add_argument("--prompts", type=positive, default=8)
    parser.add_argument("--tokens", type=positive, default=64)
    parser.add_argument("--calls", type=positive, default=30)
    parser.add_argument("--json", type=output, help="write raw results here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(TINY))
        with LLM(options.model or scratch, dummy_weights=True, progress=False) as llm:
            vocab = llm.engine.vocab_size
            ids = [[(7919 * (i + 1) + 31 * k) % vocab for i in range(options.tokens)] for k in range(options.prompts)]
            rows, plan, objects = measure(llm, ids, options.calls), llm.engine.plan.summary(), len(gc.get_objects())
    print_rows(rows)
    if options.json:
        keep({**about(options), "plan": plan, "tracked_objects": objects, "rows": rows}, options.json)


if __name__ == "__main__":
    raise SystemExit(run(main))
