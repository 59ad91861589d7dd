"""Times fa and flashinfer through minisgl's plugins: a captured decode step, its host plan, and eager prefill.

    python benchmarks/gpu_attention.py --out attention.json

16 query and 8 kv heads of 128, bfloat16. ``us`` is one layer of a replayed step of LAYERS layers, the step's metadata
included; ``plan_us`` is the host's work before a replay; bandwidth counts the keys and values that must be read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from commandline import Parser, about, keep, need_gpu, output, run
from gpu_linear import graph_microseconds

from minisgl_core.plugin_api import LayerFacts
from minisgl_core.testing.attention_bench import AttentionBench, Geometry
from minisgl_core.testing.device_fixture import DeviceFixture

KV_HEADS, RATIO, DIM, LAYERS = 8, 2, 128, 4
BACKENDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fa": ("minisgl_fa.fa3:FlashAttention3", "minisgl_fa.options:FlashAttentionOptions", {}),
    "fa, schedule per layer": (
        "minisgl_fa.fa3:FlashAttention3",
        "minisgl_fa.options:FlashAttentionOptions",
        {"schedule_once": False},
    ),
    "fa, 4 splits": (
        "minisgl_fa.fa3:FlashAttention3",
        "minisgl_fa.options:FlashAttentionOptions",
        {"decode_num_splits": 4},
    ),
    "fa, 16 splits": (
        "minisgl_fa.fa3:FlashAttention3",
        "minisgl_fa.options:FlashAttentionOptions",
        {"decode_num_splits": 16},
    ),
    "flashinfer": (
        "minisgl_flashinfer.attention:FlashInferAttention",
        "minisgl_flashinfer.options:FlashInferOptions",
        {},
    ),
    "flashinfer, tensor cores": (
        "minisgl_flashinfer.attention:FlashInferAttention",
        "minisgl_flashinfer.options:FlashInferOptions",
        {"use_tensor_cores": True},
    ),
}


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


class _Bench(AttentionBench):
    """Random numbers made on the device: there are many, and they are not checked."""

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.fixture.device)


def _bench(fixture: DeviceFixture, rows: int, longest: int, page: int) -> AttentionBench:
    facts = (LayerFacts(DIM**-0.5),) * LAYERS
    geometry = Geometry("bfloat16", "bfloat16", page, KV_HEADS, KV_HEADS * RATIO, DIM, facts, finite_tail=True)
    return _Bench(fixture, geometry, rows, longest, 0)


def _backend(name: str, bench: AttentionBench, tokens: int) -> Any:
    factory, options, values = BACKENDS[name]
    backend = _load(factory)(bench.setup(tokens), _load(options)(**values))
    backend.bind_kv(bench.pool)
    return backend


def _host_us(work: Callable[[], object], fixture: DeviceFixture, times: int = 30) -> float:
    took = []
    for _ in range(times):
        fixture.platform.synchronize()
        begin = time.perf_counter()
        work()
        took.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(took)


def decode(fixture: DeviceFixture, name: str, rows: int, length: int, longest: int, page: int) -> dict[str, Any]:
    """One captured step of ``rows`` rows of ``length`` tokens in a graph that may meet ``longest``."""
    bench = _bench(fixture, rows, longest, page)
    bench.fill([length] * rows)
    bench.lengths[:rows] = length - 1
    backend = _backend(name, bench, rows)
    backend.init_capture_graph(longest, (rows,))
    live = torch.arange(rows, device=fixture.device)
    batch = bench.captured(live)
    backend.prepare_for_capture(batch)
    eager = bench.eager("decode", [(1, length)] * rows)
    plan_us = _host_us(lambda: backend.prepare_for_replay(eager), fixture)
    wide = bench.wide(rows)
    wide.normal_()
    inputs = bench.views(wide)

    def step() -> None:
        backend.update_metadata(batch)
        for layer in range(LAYERS):
            backend.forward(*inputs, layer, batch)

    took = graph_microseconds([step]) / LAYERS
    backend.close()
    rate = rows * length * KV_HEADS * DIM * 4 / took / 1e6
    return {"backend": name, "rows": rows, "length": length, "longest": longest, "page": page,
            "us": round(took, 2), "tb_s": round(rate, 2), "plan_us": round(plan_us, 1)}  # fmt: skip


def prefill(fixture: DeviceFixture, name: str, rows: int, new: int, total: int, page: int) -> dict[str, Any]:
    """One layer of ``rows`` rows of ``new`` tokens after ``total - new`` cached ones."""
    bench = _bench(fixture, rows, total, page)
    bench.fill([total] * rows)
    backend = _backend(name, bench, rows * new)
    batch = bench.eager("prefill", [(new, total)] * rows)
    plan_us = _host_us(lambda: backend.prepare_metadata(batch), fixture, 10)
    backend.update_metadata(batch)
    wide = bench.wide(rows * new)
    wide.normal_()
    inputs = bench.views(wide)
    took = graph_microseconds([lambda: backend.forward(*inputs, 0, batch) for _ in range(4)])
    backend.close()
    flops = 4 * rows * KV_HEADS * RATIO * DIM * (new * (total - new) + new * (new + 1) / 2)
    return {"backend": name, "rows": rows, "new": new, "total": total, "page": page,
            "us": round(took, 1), "tflop_s": round(flops / took / 1e6, 1), "plan_us": round(plan_us, 1)}  # fmt: skip


def main() -> None:
    """Every case; print as found, write the JSON."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=output, default="attention.json")
    options = parser.parse_args()
    need_gpu()
    fixture, found = DeviceFixture("auto"), []
    with fixture.active():
        for rows, longest in ((1, 2048), (1, 16384), (8, 4096), (64, 2048), (256, 2048)):
            for page in (1, 16, 256):
                for name in BACKENDS:
                    found.append(decode(fixture, name, rows, 1024, longest, page))
                    print(found[-1])
        for rows, new, total in ((16, 1024, 1024), (1, 8192, 8192), (4, 512, 4096)):
            for page in (1, 16, 256):
                for name in ("fa", "flashinfer"):
                    found.append(prefill(fixture, name, rows, new, total, page))
                    print(found[-1])
    keep({**about(options), "rows": found}, options.out, indent=None)


if __name__ == "__main__":
    raise SystemExit(run(main))
