"""Times paged decode attention inside a CUDA graph: minisgl's cuda_decode over batch sizes, lengths and options.

    python benchmarks/gpu_decode.py --out decode.jsonl [--heads 16 8] [--part small large]

Heads of 128, bfloat16, pages of 16; bytes are the keys and values that must be read. A graph goes through as many
layers as it takes for none to find its keys in the L2 cache, as in a model whose weights pass through it meanwhile.
Each figure becomes a line of the file at once.

Parts: ``small``, every way to cut small batches; ``large``, several ways to cut larger ones.
"""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any, TextIO

import torch
from commandline import Parser, about, amount, need_gpu, output, positive, run
from gpu_linear import graph_microseconds

from minisgl_core.builtin.platform import CudaPlatform
from minisgl_core.plugin_api import AttentionSetup, BatchView, LayerFacts
from minisgl_cuda.attention import CudaDecodeAttention
from minisgl_cuda.options import DecodeOptions

PARTS = ("small", "large")
DIM, PAGE = 128, 16
L2_BYTES = 60e6
LEAST_LAYERS = 4
POINTS = [
    (1, 1024), (1, 128), (1, 4096), (8, 1024), (2, 1024), (4, 1024), (16, 1024), (8, 128), (2, 128), (4, 128),
    (16, 128), (8, 4096), (2, 4096), (4, 4096), (16, 4096),
]  # fmt: skip
"""(batch, tokens each) to search at, the most important first, in case time runs out."""
LARGE = [(32, 1024), (64, 128), (64, 1024), (64, 4096), (256, 128), (256, 1024)]
TILES = [
    (32, 2, 2), (32, 4, 2), (64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 4, 2), (128, 8, 2), (128, 8, 3),
]  # fmt: skip
"""(block_tokens, warps, stages)"""
LARGE_OPTIONS: list[dict[str, Any]] = [
    {"splits": splits, "block_tokens": block, "warps": warps, "stages": stages, "launches": 1}
    for block, warps, stages in ((64, 4, 3), (64, 4, 2), (32, 2, 2), (32, 2, 3), (32, 4, 2), (128, 4, 2))
    for splits in (1, 2, 4)
]
MOST_PROGRAMS = 1056
TRIED_SPLITS = 3


class Work:
    """Rows of one length, in the requested number of layers."""

    def __init__(self, heads: tuple[int, int], batch: int, length: int, layers: int) -> None:
        self.batch, self.length, self.layers = batch, length, layers
        q_heads, kv_heads = heads
        self.bytes = batch * length * kv_heads * DIM * 4
        pages = -(-length // PAGE)
        total = batch * pages
        shape = (layers, 2, total + 1, PAGE, kv_heads, DIM)
        caches = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()
        self.pool: Any = SimpleNamespace(k_cache=lambda i: caches[i, 0], v_cache=lambda i: caches[i, 1])
        self.q = torch.randn(batch, q_heads, DIM, device="cuda", dtype=torch.bfloat16)
        view = BatchView(
            None, None, 1, 40960, torch.arange(batch + 1, device="cuda", dtype=torch.int32),
            torch.full((batch,), length, device="cuda", dtype=torch.int32),
            torch.randperm(total, device="cuda", dtype=torch.int32).view(batch, pages), PAGE,
        )  # fmt: skip
        view.page_table_device, view.table_idx_device = view.slot_table()  # as in the engine
        self.fake: Any = SimpleNamespace(view=view)
        self.setup = AttentionSetup(
            torch.device("cuda"), torch.bfloat16, torch.bfloat16, "NHD", PAGE, q_heads, kv_heads, DIM,
            (LayerFacts(DIM**-0.5),) * layers, batch, 8192, 40960, 2, CudaPlatform(0),
        )  # fmt: skip

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.length}"

    def backend(self, options: dict[str, Any]) -> CudaDecodeAttention:
        made = CudaDecodeAttention(self.setup, DecodeOptions(**options))
        made.bind_kv(self.pool)
        return made

    def answer(self, options: dict[str, Any]) -> torch.Tensor:
        """The output of the first layer."""
        return self.backend(options).forward(self.q, self.q, self.q, 0, self.fake)

    def microseconds(self, options: dict[str, Any]) -> float:
        """Microseconds of one layer."""
        forward, q = self.backend(options).forward, self.q
        return graph_microseconds([lambda i=i: forward(q, q, q, i, self.fake) for i in range(self.layers)])  # type: ignore[misc]


class Bench:
    """The figures of one pair of head counts, each written as a line when it is known, until time is up."""

    def __init__(self, file: TextIO, heads: tuple[int, int], deadline: float) -> None:
        self._file, self.heads, self._deadline = file, heads, deadline

    @property
    def late(self) -> bool:
        return time.perf_counter() > self._deadline

    def write(self, **what: Any) -> None:
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()

    def work(self, batch: int, length: int) -> Work:
        """With enough layers that the others fill the L2 cache twice before a layer is used again."""
        layers = int(2 * L2_BYTES / (batch * length * self.heads[1] * DIM * 4)) + 1
        return Work(self.heads, batch, length, max(LEAST_LAYERS, layers))

    def time(self, work: Work, options: dict[str, Any]) -> float:
        """Microseconds of one call."""
        took = work.microseconds(options)
        self.write(
            heads=self.heads, batch=work.batch, length=work.length, **options, layers=work.layers,
            us=round(took, 3), tb_s=round(work.bytes / took / 1e6, 3),
        )  # fmt: skip
        return took

    def compare(self, work: Work, ways: list[dict[str, Any]]) -> None:
        """Time and print the default and all of these, and stop if the results of two differ."""
        figures: list[tuple[float, dict[str, Any]]] = []
        for options in [{}, *ways]:
            if self.late:
                print(f"{work.name}: cut short")
                break
            figures.append((self.time(work, options), options))
        if not figures:
            return
        best = sorted(figures[1:], key=lambda figure: figure[0])[:3]
        print(f"{work.name}: default {figures[0][0]:.2f} us", flush=True)
        for took, options in best:
            print(f"  {took:.2f} us, {work.bytes / took / 1e6:.2f} TB/s  {options}", flush=True)
        answers = [work.answer(options) for options in ({}, *(way for _, way in best)) for _ in range(2)]
        worst = max(float((answer - answers[0]).abs().max()) for answer in answers)
        if not worst < 1e-2:
            raise SystemExit(f"{work.name}: answers differ by {worst}: {best}")


def candidates(kv_heads: int, batch: int, length: int) -> Iterator[dict[str, Any]]:
    """Tiles, numbers of splits and ways to join them that are worth trying."""
    for block, warps, stages in TILES:
        blocks = -(-length // block)
        fitting = [
            splits
            for splits in (1, 2, 4, 8, 16, 32, 64)
            if splits < 2 * blocks and (splits == 1 or batch * kv_heads * splits <= MOST_PROGRAMS)
        ]
        for splits, launches in itertools.product(fitting[-TRIED_SPLITS:], (1, 2)):
            if splits > 1 or launches == 1:
                yield {
                    "splits": splits, "block_tokens": block, "warps": warps, "stages": stages, "launches": launches,
                }  # fmt: skip


def compile_some(heads: tuple[int, int], options: list[dict[str, Any]]) -> None:
    """Run each once, so that Triton's cache has its kernels."""
    work = Work(heads, 1, 256, 1)
    for one in options:
        work.answer(one)
    torch.cuda.synchronize()


def compile_all(heads: tuple[int, int], parts: list[str], workers: int) -> None:
    """All Triton kernels that are timed, in parallel processes."""
    every = [{"splits": splits} for splits in (1, 2, 4, 8, 16, 32, 64)]
    every += LARGE_OPTIONS if "large" in parts else []
    if "small" in parts:
        every += [options for point in POINTS for options in candidates(heads[1], *point)]
    every = list({json.dumps(options, sort_keys=True): options for options in every}.values())
    print(f"{len(every)} kernels to compile", flush=True)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_some, [heads] * workers, [every[i::workers] for i in range(workers)]))


def main() -> None:
    """Time the requested parts, until time is up."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=output, default="decode.jsonl")
    parser.add_argument("--heads", type=positive, nargs=2, default=[16, 8], help="query and kv heads")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--seconds", type=amount, default=80, help="no further candidate is tried after this")
    args = parser.parse_args()
    if args.heads[0] % args.heads[1]:
        parser.error(f"--heads: {args.heads[0]} query heads cannot share {args.heads[1]} kv heads evenly")
    need_gpu()
    start = time.perf_counter()
    torch.manual_seed(0)
    heads = (args.heads[0], args.heads[1])
    compile_all(heads, args.part, max(1, min(14, (os.cpu_count() or 2) - 2)))
    print(f"{time.perf_counter() - start:.0f} s until all is compiled", flush=True)
    gc.freeze()  # each capture collects garbage: exclude the objects of torch and Triton
    with args.out.open("w") as file:
        bench = Bench(file, heads, start + args.seconds)
        bench.write(**about(args))
        for batch, length in LARGE if "large" in args.part else ():
            bench.compare(bench.work(batch, length), LARGE_OPTIONS)
        for batch, length in POINTS if "small" in args.part else ():
            bench.compare(bench.work(batch, length), list(candidates(heads[1], batch, length)))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    raise SystemExit(run(main))
