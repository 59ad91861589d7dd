"""Search the fastest tile of the skinny matrix products against cuBLAS, and write the table that minisgl-cuda ships.

    python benchmarks/gpu_linear.py --out skinny-sm90.json
    python benchmarks/gpu_linear.py --models qwen3-4b --add skinny-sm90.json --out more.json    # keep what is in a file

Each candidate runs inside a CUDA graph over several copies of the weight, so that none stays in the L2 cache, and waits
for the one before it to end (no dependent launch), as cuBLAS does.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from commandline import Parser, about, amount, keep, need_gpu, output, run
from tqdm import tqdm

from minisgl_core.errors import UsageError
from minisgl_core.modelconfig.geometries import geometry
from minisgl_cuda.triton_ops.skinny import skinny_linear

MODELS = ("qwen3-0.6b", "qwen3-14b", "qwen3-30b-a3b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-4b")
ROWS = (1, 4, 8, 16)
WINS = 0.97
"""A tile is used if it takes less than this share of cuBLAS's time, which is more than the noise."""
WARM, REPEATS = 3, 12
L2_BYTES = 60e6


def shapes_of(name: str) -> list[tuple[int, int]]:
    """(N, K) of qkv, o, gate+up and down (of a mixture of experts: the router), head."""
    c = geometry(name)
    heads, hidden = c.num_q_heads * c.head_dim, c.hidden_size
    attention = [(heads + 2 * c.num_kv_heads * c.head_dim, hidden), (hidden, heads)]
    mlp = [(2 * c.intermediate_size, hidden), (hidden, c.intermediate_size)]
    return attention + (mlp if c.moe is None else [(c.moe.num_experts, hidden)]) + [(c.vocab_size, hidden)]


def graph_microseconds(calls: list[Callable[[], object]]) -> float:
    """Median time of one call, all of them replayed as one graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for turn in range(WARM + REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= WARM:
            times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def tiles(rows: int, n: int, k: int) -> list[tuple[int, int, int, int]]:
    """Tiles that are worth trying."""
    if rows == 1:
        grid = itertools.product((4, 8, 16, 32), (256, 512, 1024), (4, 8), (2, 3))
        return [t for t in grid if t[1] <= max(256, k) and 1024 <= t[0] * t[1] <= 16384]
    grid = itertools.product((16, 32, 64), (128, 256), (4,), (3, 5))
    return [t for t in grid if t[0] * t[1] * t[3] * 2 <= 180_000]


def measure(n: int, k: int, rows: int) -> dict[str, Any]:
    """cuBLAS and the best tile for one shape."""
    copies = max(2, min(16, int(2 * L2_BYTES / (n * k * 2)) + 1))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5 for _ in range(copies)]
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    library = graph_microseconds([lambda w=w: F.linear(x, w) for w in weights])  # type: ignore[misc]
    best, best_tile = float("inf"), None
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    for tile in tiles(rows, n, k):
        calls = [lambda w=w, t=tile: skinny_linear(out, x, w, None, *t, False) for w in weights]  # type: ignore[misc]
        try:
            took = graph_microseconds(calls)
        except Exception as error:  # skip tiles that do not fit this device
            print(f"{n}x{k} M={rows} {tile}: {type(error).__name__}")
            continue
        if took < best:
            best, best_tile = took, tile
    expected = x.float() @ weights[0].float().T
    if best_tile is None:
        raise SystemExit(f"no tile runs {n}x{k} with {rows} rows")
    skinny_linear(out, x, weights[0], None, *best_tile, False)
    error = float((out.float() - expected).abs().max() / expected.abs().max())
    gigabytes = n * k * 2 / 1e9
    return {
        "n": n, "k": k, "rows": rows, "cublas_us": library, "skinny_us": best, "tile": best_tile, "error": error,
        "cublas_tb_s": gigabytes / library * 1e3, "skinny_tb_s": gigabytes / best * 1e3,
    }  # fmt: skip


def table_of(measured: list[dict[str, Any]]) -> dict[str, list[tuple[int, list[int]]]]:
    """The table that minisgl-cuda ships: by weight and number of rows, the tile, or [] where cuBLAS serves."""
    table: dict[str, list[tuple[int, list[int]]]] = {}
    for row in sorted(measured, key=lambda row: row["rows"]):
        wins = row["skinny_us"] < WINS * row["cublas_us"]
        table.setdefault(f"{row['n']}x{row['k']}", []).append((row["rows"], list(row["tile"]) if wins else []))
    return table


def main() -> None:
    """Measure every shape; print and keep each as it comes."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=output, default="skinny-sm90.json")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help=f"geometries; {', '.join(MODELS)}")
    parser.add_argument("--add", type=Path, metavar="FILE", help="an earlier result, whose other weights are kept")
    parser.add_argument("--seconds", type=amount, default=500.0, help="no further weight is begun after this")
    options = parser.parse_args()
    shapes = list(dict.fromkeys(shape for name in options.models for shape in shapes_of(name)))
    earlier = read_measured(options.add) if options.add else []
    need_gpu()
    begin, facts = time.monotonic(), about(options)
    found = [row for row in earlier if (row["n"], row["k"]) not in shapes]
    for n, k in tqdm(shapes):
        if time.monotonic() - begin > options.seconds:
            print(f"no time left for {n}x{k}")
            continue
        found += [measure(n, k, rows) for rows in ROWS]
        for row in found[-len(ROWS) :]:
            print(
                f"{n}x{k} M={row['rows']}: cuBLAS {row['cublas_us']:.1f} us ({row['cublas_tb_s']:.2f} TB/s), skinny "
                f"{row['skinny_us']:.1f} us ({row['skinny_tb_s']:.2f} TB/s) {row['tile']}, error {row['error']:.1e}"
            )
        keep({**facts, "tiles": table_of(found), "measured": found}, options.out, indent=None)


def read_measured(path: Path) -> list[dict[str, Any]]:
    """Read the measurements of a file. Raises :class:`UsageError` if it has none."""
    try:
        return list(json.loads(path.read_text())["measured"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"--add {path} holds no measurements: {error}", field="--add", value=str(path)) from error


if __name__ == "__main__":
    raise SystemExit(run(main))
