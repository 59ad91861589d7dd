"""Times the layer operations of ops:cuda on a GPU: CUDA C++, Triton, the core's composed ones.

    python benchmarks/gpu_ops.py [--part layer|sample] [--out ops.json]

Per operation and number of tokens: microseconds in a CUDA graph with the bytes that must move, and microseconds of host
time per eager call. Then what one decoder layer costs the host. Then sampling, in Triton, of logits as sure and unsure
models and as random weights give them, with the share of the rows that one program had to go through whole. bfloat16.
Without --out the JSON goes to $OUT if that is set.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from commandline import Parser, about, keep, need_gpu, output, run
from gpu_linear import graph_microseconds

from minisgl_core.builtin.ops import ComposedOps
from minisgl_core.builtin.platform import CudaPlatform
from minisgl_core.plugin_api import KVSetup, OpsSetup, RopeStoreArgs, SampleArgs
from minisgl_cuda.kv_cpp import CudaKVKernels
from minisgl_cuda.launch import CompiledLauncher
from minisgl_cuda.ops import CudaOps
from minisgl_cuda.ops_cpp import CompiledOps
from minisgl_cuda.triton_ops import sample as sampling

TOKENS = (1, 256, 8192)
SLOTS, PAGE, POSITIONS, EPS = 65536, 16, 40960, 1e-6
BYTES = 2
"""Bytes of a bfloat16."""
BUFFERS = 4
"""Buffers used in turn, so that small sizes do not run from the L2 cache."""
ROUNDS = 8
"""Rounds through the buffers in one graph, so that its own launch does not count."""
VOCAB, BATCHES = 151936, (1, 64, 256)
PEAKS = {"peaked": (14.0, 20.0), "broad": (8.0, 14.0)}
"""The logits of twelve tokens lie between these. All others together, whose standard deviation is 2, then weigh less
than 1 per cent, or about 20, spread so thin that a nucleus of 95 per cent has thousands of tokens.
"""
SAMPLED = {
    "greedy": (sampling.GREEDY, 0.0, 0, 1.0),
    "temperature": (sampling.RANDOM, 1.0, 0, 1.0),
    "top-k": (sampling.FILTERED, 1.0, 20, 1.0),
    "top-p": (sampling.FILTERED, 1.0, 0, 0.95),
    "both": (sampling.FILTERED, 1.0, 20, 0.95),
}
"""(mode, temperature, top-k, top-p), the same in all rows"""
CALLS, REPEATS = 60, 15
"""Eager calls per measurement, no more than a stream's queue holds; the fastest of the measurements counts."""

Calls = list[Callable[[], Any]]


@dataclass(frozen=True)
class Model:
    """The part of a geometry that the operations use."""

    name: str
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int = 8
    dim: int = 128


MODELS = (Model("0.6b", 1024, 3072, 16), Model("14b", 5120, 17408, 40))


class OneRank:
    """The communicator of a single rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x"""
        return x


def randn(*shape: int) -> torch.Tensor:
    """Random numbers on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def rms_norm(ops: Any, m: Model, tokens: int) -> tuple[Calls, int]:
    """Calls on several buffers in turn, and the bytes that one call must move."""
    rows, weight = [randn(tokens, m.hidden) for _ in range(BUFFERS)], randn(m.hidden)
    return [lambda x=x: ops.rms_norm(x, weight, EPS) for x in rows], 2 * tokens * m.hidden * BYTES  # type: ignore[misc]


def add_rms_norm(ops: Any, m: Model, tokens: int) -> tuple[Calls, int]:
    """The same."""
    rows, weight = [(randn(tokens, m.hidden), randn(tokens, m.hidden)) for _ in range(BUFFERS)], randn(m.hidden)
    calls: Calls = [lambda x=x, r=r: ops.add_rms_norm(x, r, weight, EPS) for x, r in rows]  # type: ignore[misc]
    return calls, 4 * tokens * m.hidden * BYTES


def act_and_mul(ops: Any, m: Model, tokens: int) -> tuple[Calls, int]:
    """The same."""
    rows = [randn(tokens, 2 * m.intermediate) for _ in range(BUFFERS)]
    return [lambda x=x: ops.act_and_mul(x) for x in rows], 3 * tokens * m.intermediate * BYTES  # type: ignore[misc]


def qk_norm_rope_store(ops: Any, m: Model, tokens: int) -> tuple[Calls, int]:
    """The same."""
    rows = [randn(tokens, (m.q_heads + 2 * m.kv_heads) * m.dim) for _ in range(BUFFERS)]
    weights = (randn(m.dim), randn(m.dim))
    # As in the engine, a layer's caches are the same two tensors in every call.
    caches = [tuple(randn(2, SLOTS // PAGE, PAGE, m.kv_heads, m.dim)) for _ in range(BUFFERS)]
    angles = torch.randn(POSITIONS, m.dim, device="cuda")
    where = torch.randint(0, POSITIONS, (tokens,), device="cuda", dtype=torch.int32)
    out_loc = torch.randperm(SLOTS, device="cuda")[:tokens].to(torch.int32)
    calls: Calls = [
        lambda x=x, c=c: ops.qk_norm_rope_store(x, RopeStoreArgs(*weights, EPS, angles, *c), where, out_loc)  # type: ignore[misc]
        for x, c in zip(rows, caches, strict=True)
    ]
    moved = 2 * (m.q_heads + m.kv_heads) + 3 * m.kv_heads  # q and k read and written; k stored; v read and stored
    return calls, tokens * (moved * m.dim * BYTES + m.dim * 4)


CASES = {f.__name__: f for f in (rms_norm, add_rms_norm, qk_norm_rope_store, act_and_mul)}


def host_microseconds(calls: Calls) -> float:
    """Host time of one eager call, while the GPU's queue is not full."""
    best = float("inf")
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for i in range(CALLS):
            calls[i % len(calls)]()
        best = min(best, (time.perf_counter_ns() - begin) / CALLS / 1000)
    return best


def layer_microseconds(ops: Any, m: Model, tokens: int) -> float:
    """Host time of one decoder layer without its attention: four operations, four matrix products."""
    shapes = ((m.q_heads + 2 * m.kv_heads) * m.dim, m.hidden), (m.hidden, m.q_heads * m.dim)
    qkv, o, up, down = (randn(*s) for s in (*shapes, (2 * m.intermediate, m.hidden), (m.hidden, m.intermediate)))
    norm_weight, norm_weights, residual, x = (
        randn(m.hidden),
        (randn(m.dim), randn(m.dim)),
        randn(tokens, m.hidden),
        randn(tokens, m.hidden),
    )
    caches, angles = tuple(randn(2, 64, PAGE, m.kv_heads, m.dim)), torch.randn(1024, m.dim, device="cuda")
    where = torch.arange(tokens, device="cuda", dtype=torch.int32) % 1024
    out_loc = torch.zeros_like(where)
    args = RopeStoreArgs(*norm_weights, EPS, angles, *caches)

    def layer() -> None:
        y, r = ops.add_rms_norm(x, residual, norm_weight, EPS)
        q, _, _ = ops.qk_norm_rope_store(F.linear(y, qkv), args, where, out_loc)
        y, r = ops.add_rms_norm(F.linear(q.reshape(tokens, -1), o), r, norm_weight, EPS)
        F.linear(ops.act_and_mul(F.linear(y, up)), down)

    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(20):
            layer()
        times.append((time.perf_counter_ns() - begin) / 20 / 1000)
    return statistics.median(times)


def backends_of(platform: CudaPlatform, m: Model) -> dict[str, Any]:
    """The backends, by name."""
    kv_setup = KVSetup(platform.device, torch.bfloat16, torch.bfloat16, PAGE, m.kv_heads, m.dim, platform)
    setup: Any = OpsSetup(
        device=platform.device,
        dtype=torch.bfloat16,
        q_heads=m.q_heads,
        kv_heads=m.kv_heads,
        head_dim=m.dim,
        hidden_size=m.hidden,
        vocab_size=1,
        max_tokens=max(TOKENS),
        max_batch=256,
        kv=CudaKVKernels(kv_setup),
        comm=OneRank(),  # type: ignore[arg-type]
        platform=platform,
    )
    return {
        "cpp": CompiledOps(setup),
        "cpp, no PDL": CompiledOps(setup, launcher=CompiledLauncher(platform, dependent=False)),
        "triton": CudaOps(setup),
        "composed": ComposedOps(setup),
    }


def logits_of(kind: str, batch: int) -> torch.Tensor:
    """(batch, VOCAB): with ``PEAKS``, or ``flat``, all drawn alike."""
    logits = randn(batch, VOCAB)
    if kind in PEAKS:
        places = torch.randint(0, VOCAB, (batch, 12), device="cuda")
        logits = (2 * logits).scatter_add_(1, places, torch.linspace(*PEAKS[kind], 12).to(logits).expand(batch, -1))
    return logits


def sample_args(batch: int, temperature: float, top_k: int, top_p: float) -> SampleArgs:
    """Columns of one table, as the engine passes them."""
    floats = torch.tensor([temperature, top_p, 0.0], device="cuda").repeat(batch, 1)
    ints = torch.tensor([top_k, 0, 0], dtype=torch.int32, device="cuda").repeat(batch, 1)
    ints[:, 1] = torch.arange(batch)
    positions = torch.full((batch,), 1000, dtype=torch.int32, device="cuda")
    return SampleArgs(floats[:, 0], ints[:, 0], floats[:, 1], floats[:, 2], ints[:, 1], ints[:, 2], positions)


def alone_share(call: Callable[[], Any], rows: int, *, by_k: bool) -> float:
    """Of the rows of one filtered call: those that one program went through whole, to find the k-th logit, or else
    because all draws of top-p that programs share had failed.
    """
    states: list[torch.Tensor] = []
    launch = sampling.filter_rows

    def noting(*args: Any) -> tuple[torch.Tensor, ...]:
        found = launch(*args)
        chosen = found[-1][:rows]
        states.append(chosen.clone() if by_k else chosen)  # draws change it
        return found

    with patch.object(sampling, "filter_rows", noting):
        call()
    return float((states[0] < 0).float().mean())


def measure_sampling() -> list[dict[str, Any]]:
    """Time every sampling mode at every batch size."""
    found: list[dict[str, Any]] = []
    print(f"{'sampling: us in a graph, TB/s of one reading':44s}" + "".join(f"{name:>20s}" for name in SAMPLED))
    for kind in (*PEAKS, "flat"):
        for batch in BATCHES:
            buffers, size = [logits_of(kind, batch) for _ in range(BUFFERS)], batch * VOCAB * BYTES
            line = f"{kind + ' x ' + str(batch):44s}"
            for name, (mode, temperature, top_k, top_p) in SAMPLED.items():
                args = sample_args(batch, temperature, top_k, top_p)
                out = torch.empty(batch, device="cuda", dtype=torch.int32)
                calls: Calls = [lambda x=x, a=args, o=out, m=mode: sampling.sample(o, x, *a, m) for x in buffers]  # type: ignore[misc]
                share = alone_share(calls[0], batch, by_k=top_k > 0) if mode == sampling.FILTERED else 0.0
                us = graph_microseconds(calls * ROUNDS)
                found.append({"op": "sample", "how": name, "logits": kind, "tokens": batch, "backend": "triton"})
                found[-1] |= {"us": us, "bytes": size, "tb_s": size / us / 1e6, "alone_share": share}
                line += f"{us:9.2f} {size / us / 1e6:5.2f} {share:4.0%}"
            print(line)
    return found


def measure_layer(platform: CudaPlatform) -> list[dict[str, Any]]:
    """Every operation of every model, then a layer of it."""
    rows: list[dict[str, Any]] = []
    for m in MODELS:
        backends = backends_of(platform, m)
        print(f"{m.name + ': us in a graph, TB/s, host us':44s}" + "".join(f"{name:>28s}" for name in backends))
        for op, case in CASES.items():
            for tokens in TOKENS:
                line = f"{op + ' x ' + str(tokens):44s}"
                for name, ops in backends.items():
                    calls, size = case(ops, m, tokens)
                    host = host_microseconds(calls)
                    us = graph_microseconds(calls * ROUNDS)
                    rows.append({"model": m.name, "op": op, "tokens": tokens, "backend": name, "us": us})
                    rows[-1] |= {"bytes": size, "tb_s": size / us / 1e6, "host_us": host}
                    line += f"{us:12.2f} {size / us / 1e6:6.2f} {host:8.2f}"
                print(line)
        line = f"{'host us of a layer without attention, 64 x':44s}"
        for name, ops in backends.items():
            rows.append({"model": m.name, "op": "layer", "tokens": 64, "backend": name})
            rows[-1]["host_us"] = layer_microseconds(ops, m, 64)
            line += f"{rows[-1]['host_us']:28.1f}"
        print(line)
    return rows


@torch.inference_mode()
def main() -> None:
    """Every case; print a table, write the JSON."""
    parser = Parser(__doc__)
    out_dir = os.environ.get("OUT")
    parser.add_argument("--out", type=output, default=f"{out_dir}/ops.json" if out_dir else None)
    parser.add_argument("--part", choices=("layer", "sample"), help="only this one")
    options = parser.parse_args()
    need_gpu()
    platform = CudaPlatform(0)
    platform.activate()
    rows = measure_layer(platform) if options.part != "sample" else []
    rows += measure_sampling() if options.part != "layer" else []
    if options.out is not None:
        keep({**about(options), "rows": rows}, options.out)


if __name__ == "__main__":
    raise SystemExit(run(main))
