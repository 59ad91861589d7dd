"""What the freedom to choose costs: at the start, and in every call.

    python benchmarks/resolve.py [--json] [--plugins 20] [--runs 5]

At the start: discovery and resolving with 20 more plugins, each time in a fresh process that must not import torch.
In every call: a layer's attention call through the plan against the same call of the backend's own method.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from commandline import Parser, about, positive, run

PLUGIN: Final = """
from minisgl_core.plugin_api import ANY, BackendSpec, Caps, PluginInfo, hookimpl

MINISGL_PLUGIN = PluginInfo("{name}", {{"attention": ">=1,<2", "kv": ">=1,<2"}})
DTYPES = ("float32", "bfloat16", "float16")
CAPS = tuple(
    Caps(
        devices=("cpu", "cuda"),
        sm=ANY,
        dtypes=DTYPES,
        kv_dtypes=DTYPES,
        head_dims=ANY,
        gqa_ratios=ANY,
        page_sizes=ANY,
        kv_layouts=("NHD",),
        phases=phases,
        graph="decode",
    )
    for phases in (("prefill",), ("prefill", "decode"))
)


def offer(role):
    return [
        BackendSpec(role, "{name}", "{name}.code:C", variant, requires=("pluggy>=1",), caps=CAPS)
        for variant in ("", "b")
    ]


@hookimpl
def minisgl_attention_backends():
    return offer("attention")


@hookimpl
def minisgl_kv_kernels():
    return offer("kv")
"""
CHILD: Final = """
import json, sys, time
from minisgl_core.modelconfig.geometries import geometry
from minisgl_core.registry import DeviceFacts, PlanQuery, discover, resolve_plan
query = PlanQuery(geometry("qwen3-0.6b"), DeviceFacts("cpu"), "float32")
times = [(time.perf_counter(), time.process_time())]
registry = discover()
times.append((time.perf_counter(), time.process_time()))
plan = resolve_plan(query, registry, prober=lambda requests: {})
times.append((time.perf_counter(), time.process_time()))
steps = [[1000 * (b - a) for a, b in zip(x, y)] for x, y in zip(times, times[1:])]
print(json.dumps({
    "discover_ms": steps[0][0],
    "resolve_ms": steps[1][0],
    "total_ms": steps[0][0] + steps[1][0],
    "total_cpu_ms": steps[0][1] + steps[1][1],
    "plugins": len(registry.plugins),
    "torch_imported": "torch" in sys.modules,
    "plan": plan.digest(),
}))
"""
CALLS, BLOCKS = 50, 100


def write_plugins(site: Path, count: int) -> None:
    """Write distributions, each with two variants of two roles, like pip."""
    for number in range(count):
        name = f"bench_plugin_{number:02}"
        (site / f"{name}.py").write_text(PLUGIN.format(name=name))
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        headers = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: minisgl-core>=0.1\n"
        (info / "METADATA").write_text(headers)
        (info / "entry_points.txt").write_text(f"[minisgl]\nmain = {name}\n")


def start_cost(plugins: int, runs: int) -> dict[str, Any]:
    """The fastest of some fresh processes (what others lost, they lost to other programs), after one that compiles the
    plugins' bytecode.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_plugins(Path(folder), plugins)
        path = os.pathsep.join([folder, *filter(None, sys.path)])
        answers = [_child(path) for _ in range(runs + 1)][1:]
    first = answers[0]
    if any(one["torch_imported"] for one in answers) or len({one["plan"] for one in answers}) != 1:
        raise SystemExit(f"torch was imported, or the plans differ: {answers}")
    best = min(answers, key=lambda one: one["total_ms"])
    times = {key: value for key, value in best.items() if key.endswith("_ms")}
    return {**times, "plugins": first["plugins"], "runs": runs, "torch_imported": False}


def _child(path: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def call_cost() -> dict[str, Any]:
    """Microseconds of a layer's attention call in a decode batch of one row, both ways in turns: medians of the means
    of blocks, and the median of the ratios of adjacent blocks.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine, batch = _decode_batch(Path(folder))
    import torch

    backend, model = batch.attn, engine.model_config
    q = torch.randn(1, model.num_q_heads, model.head_dim)
    k, v = torch.randn(2, 1, model.num_kv_heads, model.head_dim)

    def through_plan() -> None:
        for _ in range(CALLS):
            batch.attn.forward(q, k, v, 0, batch)  # the expression that the layer evaluates

    def direct() -> None:
        for _ in range(CALLS):
            backend.forward(q, k, v, 0, batch)

    with torch.inference_mode():
        pairs = [_in_turns((through_plan, direct), first=number % 2) for number in range(BLOCKS)][BLOCKS // 10 :]
    engine.shutdown()
    plan, own = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
    return {"backend": type(backend).__name__, "plan_us": plan, "direct_us": own, "ratio": ratio}


def _in_turns(both: Sequence[Callable[[], None]], first: int) -> tuple[float, float]:
    """Microseconds per call of each, measured in turns."""
    times = [0.0, 0.0]
    for side in (first, 1 - first):
        begin = time.perf_counter_ns()
        both[side]()
        times[side] = (time.perf_counter_ns() - begin) / CALLS / 1000
    return times[0], times[1]


def _decode_batch(folder: Path) -> tuple[Any, Any]:
    """An engine of random weights, and a decode batch that it has prepared: one row of 32 tokens."""
    import torch

    from minisgl_core.core import Batch, Req, SamplingParams
    from minisgl_core.engine import Engine, EngineConfig

    torch.set_num_threads(1)
    geometry = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(geometry))
    settings = {"device": "cpu", "max_running_req": 1, "num_page_override": 128, "page_size": 1}
    engine = Engine(EngineConfig(model_path=str(folder), dummy_weights=True, progress=False, **settings))
    engine.page_table[0, :128] = torch.arange(128)
    req = Req(
        input_ids=torch.arange(32, dtype=torch.int32),
        table_idx=0,
        cached_len=0,
        output_len=8,
        uid=0,
        sampling_params=SamplingParams(max_tokens=8),
        cache_handle=None,
    )
    prefill = Batch(reqs=[req], phase="prefill")
    out = engine.forward_batch(prefill, engine.sampler.prepare(prefill))
    req.append_host(out.next_tokens_cpu[:1])
    decode = Batch(reqs=[req], phase="decode")
    engine.graph_runner.pad_batch(decode)
    engine.attn_backend.prepare_metadata(decode)
    engine.forward_batch(decode, engine.sampler.prepare(decode))
    return engine, decode


def main() -> None:
    """Print a table, or JSON."""
    parser = Parser(__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plugins", type=positive, default=20)
    parser.add_argument("--runs", type=positive, default=5)
    given = parser.parse_args()
    start, call = start_cost(given.plugins, given.runs), call_cost()
    if given.json:
        print(json.dumps({**about(given), "start": start, "call": call}, indent=2))
        return
    print(f"start with {start['plugins']} plugins, fastest of {start['runs']} processes, torch not imported")
    for key in ("discover_ms", "resolve_ms", "total_ms", "total_cpu_ms"):
        print(f"  {key:<14}{start[key]:8.1f}")
    print(f"a layer's attention call, {call['backend']}, one row of 32 tokens")
    for key, digits in (("plan_us", 2), ("direct_us", 2), ("ratio", 4)):
        print(f"  {key:<14}{call[key]:8.{digits}f}")


if __name__ == "__main__":
    raise SystemExit(run(main))
