"""Times paged decode attention inside a CUDA graph: minisgl's cuda_decode over batch sizes, lengths and options.

    python benchmarks/gpu_decode.py --out decode.jsonl

16 query and 8 kv heads of 128, bfloat16, pages of 16; bytes are the keys and values that must be read. A graph goes
through as many layers as it takes for none to find its keys in the L2 cache, as in a model whose weights pass through
it meanwhile; ``cold`` is false where four layers take turns instead. Each figure becomes a line of the file at once.
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
import triton
from commandline import Parser, amount, need_gpu, output, run
from gpu_linear import graph_microseconds

from minisgl_core.builtin.platform import CudaPlatform
from minisgl_core.plugin_api import AttentionSetup, BatchView, LayerFacts
from minisgl_cuda.attention import CudaDecodeAttention
from minisgl_cuda.options import DecodeOptions

Q_HEADS, KV_HEADS, DIM, PAGE = 16, 8, 128, 16
TOKEN_BYTES = KV_HEADS * DIM * 4
"""Keys and values of one token in one layer."""
L2_BYTES = 60e6
WARM_LAYERS = 4
POINTS = [
    (1, 1024), (1, 128), (1, 4096), (8, 1024), (2, 1024), (4, 1024), (16, 1024), (8, 128), (2, 128), (4, 128),
    (16, 128), (8, 4096), (2, 4096), (4, 4096), (16, 4096),
]  # fmt: skip
"""(batch, tokens each) to search at: where time ends early, the first are there."""
LARGE = [(64, 128), (64, 1024), (64, 4096), (256, 128), (256, 1024)]
LARGE_OPTIONS: list[dict[str, Any]] = [
    {"launches": launches, "dependent_launch": dependent} for launches in (1, 2) for dependent in (False, True)
]
"""Only these are timed there; keys are not cut."""
TILES = [
    (32, 2, 2), (32, 4, 2), (64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 4, 2), (128, 8, 2), (128, 8, 3),
]  # fmt: skip
"""(block_tokens, warps, stages)"""
MOST_PROGRAMS = 1056
TRIED_SPLITS = 3


class Work:
    """Rows of one length, in as many layers as asked for."""

    def __init__(self, batch: int, length: int, layers: int) -> None:
        self.batch, self.layers = batch, layers
        pages = -(-length // PAGE)
        total = batch * pages
        shape = (layers, 2, total + 1, PAGE, KV_HEADS, DIM)
        caches = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()
        self.pool: Any = SimpleNamespace(k_cache=lambda i: caches[i, 0], v_cache=lambda i: caches[i, 1])
        self.q = torch.randn(batch, Q_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        view = BatchView(
            None, None, 1, 40960, torch.arange(batch + 1, device="cuda", dtype=torch.int32),
            torch.full((batch,), length, device="cuda", dtype=torch.int32),
            torch.randperm(total, device="cuda", dtype=torch.int32).view(batch, pages), PAGE,
        )  # fmt: skip
        view.page_table_device, view.table_idx_device = view.slot_table()  # as the engine has them at hand
        self.fake: Any = SimpleNamespace(view=view)
        self.setup = AttentionSetup(
            torch.device("cuda"), torch.bfloat16, torch.bfloat16, "NHD", PAGE, Q_HEADS, KV_HEADS, DIM,
            (LayerFacts(DIM**-0.5),) * layers, batch, 8192, 40960, 2, CudaPlatform(0),
        )  # fmt: skip

    def backend(self, options: dict[str, Any]) -> CudaDecodeAttention:
        made = CudaDecodeAttention(self.setup, DecodeOptions(**options))
        made.bind_kv(self.pool)
        return made

    def answer(self, options: dict[str, Any]) -> torch.Tensor:
        """The first layer's."""
        return self.backend(options).forward(self.q, self.q, self.q, 0, self.fake)

    def microseconds(self, options: dict[str, Any]) -> float:
        """Of one layer."""
        forward, q = self.backend(options).forward, self.q
        return graph_microseconds([lambda i=i: forward(q, q, q, i, self.fake) for i in range(self.layers)])  # type: ignore[misc]


def cold_layers(batch: int, length: int) -> int:
    """So many that, when a layer's turn comes again, the others have filled the L2 cache twice."""
    return max(WARM_LAYERS, int(2 * L2_BYTES / (batch * length * TOKEN_BYTES)) + 1)


def candidates(batch: int, length: int) -> Iterator[dict[str, Any]]:
    """Tiles, numbers of parts and ways to join them that are worth a try."""
    for block, warps, stages in TILES:
        blocks = -(-length // block)
        fitting = [
            splits
            for splits in (1, 2, 4, 8, 16, 32, 64)
            if splits < 2 * blocks and (splits == 1 or batch * KV_HEADS * splits <= MOST_PROGRAMS)
        ]
        for splits, launches in itertools.product(fitting[-TRIED_SPLITS:], (1, 2)):
            if splits > 1 or launches == 1:
                yield {
                    "splits": splits, "block_tokens": block, "warps": warps, "stages": stages, "launches": launches,
                }  # fmt: skip


def compile_some(options: list[dict[str, Any]]) -> None:
    """Run each once, so that Triton's cache has its kernels."""
    work = Work(1, 256, 1)
    for one in options:
        work.answer(one)
    torch.cuda.synchronize()


def compile_all(workers: int) -> None:
    """All kernels that are timed, in processes beside each other."""
    tried = [options for point in POINTS for options in candidates(*point)]
    dependent = [{**options, "dependent_launch": True} for options in tried if options["launches"] == 1]
    large = [{"splits": 1, **options} for options in LARGE_OPTIONS]
    every = list({json.dumps(options, sort_keys=True): options for options in [*large, *tried, *dependent]}.values())
    print(f"{len(every)} kernels to compile", flush=True)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_some, [every[i::workers] for i in range(workers)]))


class Log:
    """Figures, one a line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, **what: Any) -> None:
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()

    def time(self, work: Work, batch: int, length: int, options: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Time, write, return."""
        took = work.microseconds(options)
        found = {
            "batch": batch, "length": length, **options, **more, "layers": work.layers, "us": round(took, 3),
            "tb_s": round(batch * length * TOKEN_BYTES / took / 1e6, 3),
        }  # fmt: skip
        self.write(**found)
        return found


def search(log: Log, batch: int, length: int, deadline: float) -> None:
    """Every candidate; the best of each way to join from a warm cache too, that of one launch also dependent."""
    work, warm = Work(batch, length, cold_layers(batch, length)), Work(batch, length, WARM_LAYERS)
    default = log.time(work, batch, length, {}, cold=True), log.time(warm, batch, length, {}, cold=False)
    best: dict[int, tuple[float, dict[str, Any]]] = {}
    for options in candidates(batch, length):
        if time.perf_counter() > deadline:
            print(f"{batch} x {length}: cut short")
            break
        found = log.time(work, batch, length, options, cold=True)["us"]
        if found < best.get(options["launches"], (float("inf"),))[0]:
            best[options["launches"]] = found, options
    print(f"{batch} x {length}: default {default[0]['us']:.2f} us (warm {default[1]['us']:.2f})", flush=True)
    for launches, (cold, options) in sorted(best.items()):
        ways = [(warm, options, False)]
        if launches == 1:
            dependent = {**options, "dependent_launch": True}
            ways += [(work, dependent, True), (warm, dependent, False)]
        figures = [log.time(on, batch, length, how, cold=is_cold)["us"] for on, how, is_cold in ways]
        text = f"{cold:.2f} us (warm {figures[0]:.2f})"
        if launches == 1:
            text += f", dependent {figures[1]:.2f} (warm {figures[2]:.2f})"
        print(f"  {launches} launch{'es' * (launches > 1)}: {text}  {options}", flush=True)
    compare(work, batch, length, [options for _, options in best.values()])


def compare(work: Work, batch: int, length: int, ways: list[dict[str, Any]]) -> None:
    """Stop where two ways to compute the same disagree."""
    answers = [work.answer(options) for options in ways for _ in range(2)]
    worst = max((float((answer - answers[0]).abs().max()) for answer in answers), default=0.0)
    if not worst < 1e-2:
        raise SystemExit(f"{batch} x {length}: answers differ by {worst}: {ways}")


def main() -> None:
    """Search the small batches, time the large ones."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=output, default="decode.jsonl")
    parser.add_argument("--seconds", type=amount, default=80, help="no further candidate is tried after this")
    args = parser.parse_args()
    need_gpu()
    start = time.perf_counter()
    torch.manual_seed(0)
    compile_all(max(1, min(14, (os.cpu_count() or 2) - 2)))
    print(f"{time.perf_counter() - start:.0f} s until all is compiled", flush=True)
    with args.out.open("w") as file:
        log = Log(file)
        log.write(device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
        for batch, length in LARGE:
            work = Work(batch, length, cold_layers(batch, length))
            for options in LARGE_OPTIONS:
                found = log.time(work, batch, length, options, cold=True)
                print(f"{batch} x {length}: {found['us']:.1f} us, {found['tb_s']:.2f} TB/s  {options}", flush=True)
        del work
        gc.freeze()  # each capture collects garbage: let it not go through torch and Triton
        for batch, length in POINTS:
            if time.perf_counter() - start < args.seconds:
                search(log, batch, length, start + args.seconds)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    raise SystemExit(run(main))
