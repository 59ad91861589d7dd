"""Find the best tiles of moe:fused for one geometry on this GPU, and compare them with what the GPU could do.

    python benchmarks/gpu_moe.py                       # Qwen3-30B-A3B's experts; below three minutes
    python benchmarks/gpu_moe.py --out my-tiles        # where the tile table goes; $OUT if set, else the package
    python benchmarks/gpu_moe.py --no-search           # time what is used now

The table and the report are written anew after every number of tokens; those for which no time is left are not in
them, and the nearest one that is serves in their place.

Every candidate is compiled once by a pool of processes, then timed inside a CUDA graph over several layers' weights, so
that none of them stays in the L2 cache. Routing is uniform. Bandwidth counts each touched expert's weights once, and
arithmetic each pair once: padding and reading twice show up as less.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from commandline import Parser, about, amount, need_gpu, positive, run
from rich.console import Console
from rich.table import Table

from minisgl_core.builtin.platform import CudaPlatform
from minisgl_core.files import require_writable_folder
from minisgl_core.plugin_api import MoESetup
from minisgl_moe.executor import FusedMoE, FusedWeights
from minisgl_moe.tiles import SHIPPED, Geometry, Tile, Tiling, default_tiling, dump_table, load_table, tiling_at
from minisgl_moe.triton_ops.align import Alignment, align
from minisgl_moe.triton_ops.grouped import down_grouped, sum_pairs, up_grouped
from minisgl_moe.triton_ops.pairs import down_pairs, up_pairs

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BYTES_PER_S, FLOPS = 4.2e12, 790e12
"""Rates of a device copy and a large bfloat16 product on an H200."""
LAYERS = 3
Side = Literal["up", "down"]


# --- candidates -------------------------------------------------------------------------------------------------------


def pair_tiles() -> list[Tile]:
    cuts = ((2, 1024), (4, 256), (4, 512), (4, 1024), (8, 256), (8, 512), (16, 256), (16, 512))
    return [Tile(1, n, k, warps=warps) for (n, k), warps in product(cuts, (4, 8))]


def grouped_tiles(block_m: int, hopper: bool) -> list[Tile]:
    """Up to 32 rows the loads dominate: narrow blocks, deep prefetching. From 64 on arithmetic
    dominates: wide blocks.
    """
    tiles = []
    if block_m <= 32:
        kinds = ((0, 0), (1, 0), (1, 1)) if hopper else ((0, 0), (1, 0))
        for n, k, stages, (swap, tma) in product((64, 128), (64, 128), (3, 4, 5), kinds):
            tiles.append(Tile(block_m, n, k, 1, 4, stages, swap, tma))
    else:
        shapes = ((128, 4), (128, 8), (256, 8))
        groups = (8,) if block_m == 64 else (8, 24)
        for (n, warps), stages, group, tma in product(shapes, (3, 4), groups, (0, 1) if hopper else (0,)):
            tiles.append(Tile(block_m, n, 64, group, warps, stages, 0, tma))
    return tiles


def blocks_for(geometry: Geometry, tokens: int) -> list[int]:
    """Block heights worth trying for this many rows per touched expert."""
    rows = tokens * geometry.top_k / geometry.touched(tokens)
    return [m for m in (16, 32, 64, 128) if min(64, rows / 2) <= m <= max(32, 2.5 * rows)]


def pairs_pay(geometry: Geometry, tokens: int) -> bool:
    return tokens * geometry.top_k <= 1.6 * geometry.touched(tokens)


# --- running one kernel -----------------------------------------------------------------------------------------------


@dataclass
class Work:
    """Random layers, and one batch of tokens routed anew in each."""

    geometry: Geometry
    tokens: int
    layers: list[FusedWeights]

    def __post_init__(self) -> None:
        g, device = self.geometry, self.layers[0].w2.device
        kind: dict[str, Any] = {"dtype": self.layers[0].w2.dtype, "device": device}
        self.x = torch.randn(self.tokens, g.hidden, **kind)
        self.ids = [
            torch.rand(self.tokens, g.experts, device=device).topk(g.top_k).indices.to(torch.int32) for _ in self.layers
        ]
        self.scale = torch.rand(self.tokens, g.top_k, device=device)
        self.inner = torch.randn(self.pairs, g.inner, **kind)
        self.rows = torch.empty(self.pairs, g.hidden, **kind)
        self.out = torch.empty_like(self.x)
        self._aligned: dict[int, list[Alignment]] = {}

    @property
    def pairs(self) -> int:
        return self.tokens * self.geometry.top_k

    @cached_property
    def touched(self) -> float:
        """Experts that a layer needs, on average."""
        return sum(len(ids.unique()) for ids in self.ids) / len(self.ids)

    def aligned(self, block_m: int) -> list[Alignment]:
        if block_m not in self._aligned:
            made = []
            for ids in self.ids:
                made.append(Alignment.empty(self.pairs, self.geometry.experts, ids.device))
                align(*made[-1], ids, self.geometry.experts, block_m)
            self._aligned[block_m] = made
        return self._aligned[block_m]

    def run(self, side: Side, tile: Tile) -> None:
        """One product of every layer."""
        for i, weights in enumerate(self.layers):
            if tile.block_m == 1 and side == "up":
                up_pairs(self.inner, self.x, weights.w13, self.ids[i], tile)
            elif tile.block_m == 1:
                down_pairs(self.out, self.inner, weights.w2, self.scale, self.ids[i], tile)
            else:
                slots, experts, total, _ = self.aligned(tile.block_m)[i]
                if side == "up":
                    up_grouped(self.inner, self.x, weights.w13, slots, experts, total, self.geometry.top_k, tile)
                else:
                    down_grouped(self.rows, self.inner, weights.w2, self.scale, slots, experts, total, tile)

    def run_rest(self, block_m: int) -> None:
        """What sorting needs in addition to the products."""
        for i, ids in enumerate(self.ids):
            align(*self.aligned(block_m)[i], ids, self.geometry.experts, block_m)
            sum_pairs(self.out, self.rows, ids, self.geometry.experts)


def random_layers(geometry: Geometry, count: int, *, filled: bool = True) -> list[FusedWeights]:
    kind: dict[str, Any] = {"dtype": getattr(torch, geometry.dtype), "device": "cuda"}
    made = []
    for _ in range(count):
        w13 = torch.empty(geometry.experts, 2 * geometry.inner, geometry.hidden, **kind)
        w2 = torch.empty(geometry.experts, geometry.hidden, geometry.inner, **kind)
        if filled:
            w13.normal_(0, geometry.hidden**-0.5)
            w2.normal_(0, geometry.inner**-0.5)
        made.append(FusedWeights(w13, w2))
    return made


def seconds(run: Callable[[], None]) -> float:
    """Per layer of the ``LAYERS`` that ``run`` goes through: the best of three replays of about two milliseconds."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    repeats = max(1, min(10, int(2e-3 / max(1e-6, time.perf_counter() - start))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    graph.replay()
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return min(times) / repeats / LAYERS


# --- compiling in parallel --------------------------------------------------------------------------------------------


def compile_batch(geometry: Geometry, jobs: list[tuple[Side, Tile]]) -> list[tuple[Side, Tile, str]]:
    """Run each once in a separate process, so that its code is in Triton's cache. Returns those that cannot run."""
    work = Work(geometry, 16, random_layers(geometry, 1, filled=False))
    refused = []
    for side, tile in jobs:
        try:
            work.run(side, tile)
            torch.cuda.synchronize()
        except Exception as error:  # one candidate may fail in any way without affecting the others
            refused.append((side, tile, f"{type(error).__name__}: {str(error)[:100]}"))
    return refused


def compile_all(geometry: Geometry, jobs: list[tuple[Side, Tile]], budget: float) -> set[tuple[Side, Tile]]:
    """The tilings that can be timed; those not compiled within ``budget`` seconds are left out."""
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context)
    shares = [jobs[i :: workers * 8] for i in range(workers * 8)]
    running = {pool.submit(compile_batch, geometry, share): share for share in shares if share}
    done, late = wait(running, timeout=budget)
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=not late, cancel_futures=True)
    for process in processes if late else ():  # running compilers do not react to a cancellation
        process.kill()
    failed = [future for future in done if future.exception() is not None]
    refused = [item for future in done if future not in failed for item in future.result()]
    good = {job for future in done if future not in failed for job in running[future]}
    good -= {(side, tile) for side, tile, _ in refused}
    print(f"{len(good)} of {len(jobs)} kernels compiled, {sum(len(running[f]) for f in late)} left out as too late")
    for message, count in Counter(message for *_, message in refused).most_common():
        print(f"  {count} refused: {message}")
    for future in failed:
        print(f"  {len(running[future])} lost: {future.exception()}")
    return good


def all_jobs(geometry: Geometry, counts: Iterable[int], hopper: bool) -> list[tuple[Side, Tile]]:
    blocks = sorted({m for tokens in counts for m in blocks_for(geometry, tokens)})
    tiles = [tile for m in blocks for tile in grouped_tiles(m, hopper)]
    sides: tuple[Side, ...] = ("up", "down")
    return [(side, tile) for side in sides for tile in pair_tiles() + tiles]


# --- searching --------------------------------------------------------------------------------------------------------


def best_tiling(work: Work, good: set[tuple[Side, Tile]], hopper: bool) -> Tiling:
    """The fastest pair of tiles of each block height, then the fastest height; the rule's where none was compiled."""

    def fastest(side: Side, tiles: list[Tile]) -> tuple[float, Tile] | None:
        ready = [tile for tile in tiles if (side, tile) in good]
        timed = [(seconds(partial(work.run, side, tile)), tile) for tile in ready]
        return min(timed) if timed else None

    def totals() -> Iterator[tuple[float, Tiling]]:
        heights = [1] * pairs_pay(work.geometry, work.tokens) + blocks_for(work.geometry, work.tokens)
        for block_m in heights:
            tiles = pair_tiles() if block_m == 1 else grouped_tiles(block_m, hopper)
            up, down = fastest("up", tiles), fastest("down", tiles)
            if up is not None and down is not None:
                rest = seconds(partial(work.run_rest, block_m)) if block_m > 1 else 0.0
                yield up[0] + down[0] + rest, Tiling(block_m > 1, up[1], down[1])

    found = list(totals())
    return min(found)[1] if found else default_tiling(work.geometry, work.tokens)


def whole(work: Work, tiling: Tiling) -> tuple[float, torch.Tensor]:
    """(seconds per layer of the executor itself, the first layer's result)."""
    g = work.geometry
    dtype = getattr(torch, g.dtype)
    setup = MoESetup(
        work.x.device, dtype, g.experts, g.top_k, g.hidden, g.inner, LAYERS, work.tokens, platform=CudaPlatform(0)
    )
    moe = FusedMoE(setup)
    run = moe._run_grouped if tiling.grouped else moe._run_pairs

    def layers() -> None:
        for weights, ids in zip(work.layers, work.ids, strict=True):
            run(work.out, work.x, ids, work.scale, weights, tiling)

    took = seconds(layers)
    run(work.out, work.x, work.ids[0], work.scale, work.layers[0], tiling)
    return took, work.out.clone()


def row_of(work: Work, tiling: Tiling, guess: Tiling) -> dict[str, Any]:
    """The row of results for one number of tokens."""
    g, size = work.geometry, work.x.element_size()
    took, found = whole(work, tiling)
    guessed, expected = whole(work, guess)
    worst = float((found - expected).abs().max() / expected.std())
    up, down = seconds(partial(work.run, "up", tiling.up)), seconds(partial(work.run, "down", tiling.down))
    moved = (work.touched * 3 * g.inner * g.hidden + 2 * work.tokens * g.hidden) * size
    flops = 6.0 * work.pairs * g.inner * g.hidden
    limit = max(moved / BYTES_PER_S, flops / FLOPS)
    return {
        "tokens": work.tokens,
        "kind": "grouped" if tiling.grouped else "pairs",
        "us": took * 1e6,
        "up_us": up * 1e6,
        "down_us": down * 1e6,
        "guess_us": guessed * 1e6,
        "tb_s": moved / took / 1e12,
        "tflop_s": flops / took / 1e12,
        "limit_share": limit / took,
        "worst_difference": worst,
        "up": tuple(tiling.up),
        "down": tuple(tiling.down),
    }


def print_rows(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    names = ("tokens", "kind", "us", "up_us", "down_us", "guess_us", "tb_s", "tflop_s", "limit_share")
    for name in (*names, "up tile", "down tile"):
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: row["tokens"]):
        shown = [f"{row[name]:.1f}" if name.endswith("us") else f"{row[name]:.3g}" for name in names[2:]]
        table.add_row(str(row["tokens"]), row["kind"], *shown, *(" ".join(map(str, row[s])) for s in ("up", "down")))
    Console(width=170).print(table)


def arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    for name, value in (("experts", 128), ("top-k", 8), ("inner", 768), ("hidden", 2048)):
        parser.add_argument(f"--{name}", type=positive, default=value)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--tokens", type=positive, nargs="+", default=list(TOKENS))
    parser.add_argument("--compile-seconds", type=amount, default=90, help="candidates not ready by then are left out")
    parser.add_argument("--seconds", type=amount, default=170, help="no further number of tokens begins after this")
    parser.add_argument("--no-search", action="store_true", help="time the present table or guess, write no table")
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if "OUT" in os.environ else SHIPPED)
    args = parser.parse_args()
    need_gpu()
    if args.out != SHIPPED or not args.no_search:
        require_writable_folder(args.out, "tiles", field="--out")
    return args


def report(row: dict[str, Any]) -> str:
    return (
        f"{row['tokens']} tokens: {row['us']:.1f} us, {row['limit_share']:.0%} of the limit; by rule "
        f"{row['guess_us']:.1f} us; largest difference between the two {row['worst_difference']:.1e}"
    )


def main() -> None:
    args, start = arguments(), time.perf_counter()
    torch.manual_seed(0)
    arch, facts = CudaPlatform(0).sm, about(args)
    geometry = Geometry(arch, args.dtype, args.experts, args.top_k, args.inner, args.hidden)
    hopper = arch >= 90
    table = load_table(geometry, (args.out, SHIPPED)) if args.no_search else None
    jobs = all_jobs(geometry, args.tokens, hopper)
    good = set() if args.no_search else compile_all(geometry, jobs, min(args.compile_seconds, args.seconds / 2))
    print(f"{time.perf_counter() - start:.0f} s until here", flush=True)
    layers, rows, tilings = random_layers(geometry, LAYERS), [], {}
    for tokens in [*args.tokens[::2], *args.tokens[1::2]]:  # if time runs out, every other size has been measured
        if time.perf_counter() - start > args.seconds:
            print(f"no time left for {tokens} tokens", flush=True)
            continue
        work = Work(geometry, tokens, layers)
        tilings[tokens] = tiling_at(geometry, tokens, table) if args.no_search else best_tiling(work, good, hopper)
        rows.append(row_of(work, tilings[tokens], default_tiling(geometry, tokens)))
        print(report(rows[-1]), flush=True)
        write(args, geometry, tilings, rows, facts)
    print_rows(
        rows, f"{geometry.file_name.removesuffix('.json')} on {facts['device']}, {time.perf_counter() - start:.0f} s"
    )
    if off := [row["tokens"] for row in rows if not row["worst_difference"] < 5e-2]:
        raise SystemExit(f"tilings disagree about the result for {off} tokens")


def write(
    args: argparse.Namespace,
    geometry: Geometry,
    tilings: dict[int, Tiling],
    rows: list[dict[str, Any]],
    facts: dict[str, Any],
) -> None:
    """The table that moe:fused reads, and next to it, outside the package, the measurements."""
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.no_search:
        (args.out / geometry.file_name).write_text(dump_table(tilings, **facts))
    if args.out != SHIPPED:
        (args.out / "gpu_moe.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(run(main))
