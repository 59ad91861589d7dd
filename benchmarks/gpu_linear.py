"""Search the fastest tile of the skinny matrix products against cuBLAS, and write the table that minisgl-cuda ships.

    python benchmarks/gpu_linear.py --out skinny-sm90.json

Each candidate runs inside a CUDA graph over several copies of the weight, so that none stays in the L2 cache, and waits
for the one before it to end (no dependent launch), as cuBLAS does.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from commandline import Parser, keep, need_gpu, output, positive, run
from tqdm import tqdm

from minisgl_cuda.triton_ops.skinny import skinny_linear

SHAPES = [
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024),
    (7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408), (151936, 5120),
    (5120, 2048), (2048, 4096), (128, 2048), (151936, 2048),
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096),
    (4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (152064, 3584),
    (6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728), (151936, 2560),
]  # fmt: skip
"""qkv, o, gate+up, down and head of Qwen3-0.6B and 14B; qkv, o, router and head of 30B-A3B; then as the first of
Llama-3.1-8B, Qwen2.5-7B and Qwen3-4B."""
ROWS = (1, 4, 8, 16)
WARM, REPEATS = 3, 12
L2_BYTES = 60e6


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
    """Candidates worth a try."""
    if rows == 1:
        grid = itertools.product((4, 8, 16, 32), (256, 512, 1024), (4, 8), (2, 3))
        return [t for t in grid if t[1] <= max(256, k) and 1024 <= t[0] * t[1] <= 16384]
    grid = itertools.product((16, 32, 64), (128, 256), (4,), (3, 5))
    return [t for t in grid if t[0] * t[1] * t[3] * 2 <= 180_000]


def measure(n: int, k: int, rows: int) -> dict[str, object]:
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
        except Exception as error:  # a tile that does not fit this device is no candidate
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


def main() -> None:
    """Measure every shape; print a table, write the JSON."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=output, default="skinny-sm90.json")
    parser.add_argument("--shapes", type=positive, default=len(SHAPES), help="only the first so many shapes")
    options = parser.parse_args()
    need_gpu()
    found: list[dict[str, object]] = []
    table: dict[str, list[tuple[int, list[int]]]] = {}
    for (n, k), rows in tqdm(list(itertools.product(SHAPES[: options.shapes], ROWS))):
        row = measure(n, k, rows)
        found.append(row)
        wins = float(row["skinny_us"]) < 0.97 * float(row["cublas_us"])  # type: ignore[arg-type]
        table.setdefault(f"{n}x{k}", []).append((rows, list(row["tile"]) if wins else []))  # type: ignore[call-overload]
        print(
            f"{n}x{k} M={rows}: cuBLAS {row['cublas_us']:.1f} us ({row['cublas_tb_s']:.2f} TB/s), "
            f"skinny {row['skinny_us']:.1f} us ({row['skinny_tb_s']:.2f} TB/s) {row['tile']}, error {row['error']:.1e}"
        )
    device = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    content = {"device": device, "versions": versions, "tiles": table, "measured": found}
    keep(content, options.out, indent=None)


if __name__ == "__main__":
    raise SystemExit(run(main))
