"""Time products fused with the norm before and the activation behind, against separate kernels.

    python benchmarks/gpu_linear_fused.py --table skinny-sm90.json --out skinny-sm90.json

For the merged projections of three models, by rows: the best tile of each form, and the chain that it would replace as
the engine launches it: norm and activation in CUDA C++ and the product by ``linear:skinny``, all dependently, but where
its table gives the product to cuBLAS. Both run in a CUDA graph over several copies of the weight. A form that wins gets
its tile into the table that minisgl-cuda ships, whose other parts are kept; the norm and the activation together must
also beat the activation alone behind a norm.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from commandline import Parser, about, keep, need_gpu, output, positive, run
from gpu_linear import L2_BYTES, graph_microseconds
from gpu_ops import EPS, OneRank, randn
from tqdm import tqdm

from minisgl_core.builtin.platform import CudaPlatform
from minisgl_core.errors import UsageError
from minisgl_core.plugin_api import LinearSetup, OpsSetup
from minisgl_cuda.linear import FUSED_PARTS, SkinnyLinear
from minisgl_cuda.ops_cpp import CompiledOps
from minisgl_cuda.triton_ops.skinny import skinny_linear

NORM, ACT, BOTH = FUSED_PARTS
SHAPES = {
    (4096, 1024): (NORM,), (6144, 1024): (ACT, BOTH),
    (7168, 5120): (NORM,), (34816, 5120): (ACT, BOTH),
    (5120, 2048): (NORM,),
    (6144, 4096): (NORM,), (28672, 4096): (ACT, BOTH),
    (4608, 3584): (NORM,), (37888, 3584): (ACT, BOTH),
    (6144, 2560): (NORM,), (19456, 2560): (ACT, BOTH),
}  # fmt: skip
"""qkv and gate+up of Qwen3-0.6B and 14B, qkv of 30B-A3B, qkv and gate+up of Llama-3.1-8B, Qwen2.5-7B and Qwen3-4B,
each with the forms that its place in a layer allows."""
ROWS = (1, 4, 8, 16)
"""Only products of one row are fused with norms."""
WINS = 0.97
"""A fused product is used if it takes less than this share of the time of what it replaces."""

Form = tuple[bool, bool]
Tile = tuple[int, int, int, int]


@dataclass(frozen=True)
class Work:
    """A form of a product of ``rows`` rows on weights (n, k)."""

    n: int
    k: int
    rows: int
    form: Form

    @property
    def name(self) -> str:
        return f"{self.n}x{self.k} M={self.rows} {FUSED_PARTS[self.form]}"

    def tiles(self) -> Iterator[Tile]:
        """Tiles that are worth trying."""
        if self.rows == 1:
            for block_n, block_k, warps in itertools.product((4, 8, 16), (512, 1024), (4, 8)):
                if block_n * block_k <= 8192:
                    yield block_n, block_k, warps, 3
        else:
            for block_n, block_k, stages in itertools.product((16, 32, 64), (128, 256), (3, 5)):
                if (stages - 1) * (block_n + 16) * block_k * 2 <= 180_000:
                    yield block_n, block_k, 4, stages


class Buffers:
    """One copy of all tensors of a chain."""

    def __init__(self, work: Work) -> None:
        n, k, rows = work.n, work.k, work.rows
        self.weight = randn(n, k) / k**0.5
        self.x, self.residual, self.norm_weight = randn(rows, k), randn(rows, k), randn(k)
        self.total = torch.empty_like(self.x)
        self.out = randn(rows, n // 2 if work.form[1] else n)

    def fused(self, form: Form, tile: Tile, x: torch.Tensor | None = None) -> None:
        """One kernel."""
        norm, act = form
        before = (self.total, self.residual, self.norm_weight, EPS) if norm else (None, None, None, 0.0)
        skinny_linear(self.out, self.x if x is None else x, self.weight, None, *tile, True, act, *before)


def compile_tile(work: Work, tile: Tile) -> None:
    """Fill Triton's cache. A tile that does not fit this device fails again, and is skipped, when it is timed."""
    try:
        Buffers(work).fused(work.form, tile)
    except Exception as error:
        print(f"{work.name} {tile}: {type(error).__name__}")


class Bench:
    """The backends whose kernels a fused product replaces."""

    def __init__(self) -> None:
        device = torch.device("cuda")
        platform = CudaPlatform(0)
        self.linear = SkinnyLinear(LinearSetup(device, torch.bfloat16, 64, platform))
        kv: Any = None
        rank: Any = OneRank()
        self.ops = CompiledOps(OpsSetup(device, torch.bfloat16, 16, 8, 128, 1024, 151936, 64, 64, kv, rank, platform))
        self.act_tiles: dict[tuple[int, int, int], Tile] = {}

    def best(self, work: Work, buffers: list[Buffers]) -> tuple[float, Tile]:
        """Microseconds of the fastest tile."""
        found: list[tuple[float, Tile]] = []
        for tile in work.tiles():
            calls: list[Callable[[], object]] = [lambda b=b, t=tile: b.fused(work.form, t) for b in buffers]  # type: ignore[misc]
            try:
                found.append((graph_microseconds(calls), tile))
            except Exception as error:  # skip tiles that do not fit this device
                print(f"{work.name} {tile}: {type(error).__name__}")
        if not found:
            raise SystemExit(f"no tile runs {work.name}")
        return min(found)

    def chain(self, work: Work, buffers: list[Buffers], act_tile: Tile | None = None) -> float:
        """Microseconds of norm, product and activation, as far as the form has them; the last two may be fused by a
        tile.
        """
        norm, act = work.form
        prepared = [self.linear.prepare_weights(b.weight) for b in buffers]

        def call(b: Buffers, weights: Any) -> None:
            x = self.ops.add_rms_norm(b.x, b.residual, b.norm_weight, EPS)[0] if norm else b.x
            if act_tile is not None:
                b.fused(ACT, act_tile, x)
                return
            y = self.linear.forward(x, weights)
            if act:
                self.ops.act_and_mul(y)

        return graph_microseconds([lambda b=b, w=w: call(b, w) for b, w in zip(buffers, prepared, strict=True)])  # type: ignore[misc]

    def measure(self, work: Work) -> dict[str, Any]:
        """The best tile of a form and what it replaces."""
        copies = max(4, min(24, int(2 * L2_BYTES / (work.n * work.k * 2)) + 1))
        buffers = [Buffers(work) for _ in range(copies)]
        torch.cuda.synchronize()  # products read their weight before they wait for earlier kernels
        error = self.error_of(work, buffers[0], next(work.tiles()))
        took, tile = self.best(work, buffers)
        error = max(error, self.error_of(work, buffers[0], tile))
        separate = self.chain(work, buffers)
        row: dict[str, Any] = {
            "n": work.n, "k": work.k, "rows": work.rows, "form": FUSED_PARTS[work.form], "fused_us": took, "tile": tile,
            "separate_us": separate, "error": error, "gigabytes": work.n * work.k * 2 / 1e9,
        }  # fmt: skip
        key = (work.n, work.k, work.rows)
        if work.form == ACT:
            self.act_tiles[key] = tile
        elif work.form == BOTH:
            row["norm_then_act_us"] = self.chain(work, buffers, self.act_tiles[key])
            separate = min(separate, row["norm_then_act_us"])
        row["wins"] = took < WINS * separate
        return row

    def error_of(self, work: Work, b: Buffers, tile: Tile) -> float:
        """The largest error over the largest value, against float64."""
        norm, act = work.form
        b.fused(work.form, tile)
        x = b.x.double()
        if norm:
            x = (b.x.float() + b.residual.float()).bfloat16().double()
            x *= torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * b.norm_weight.double()
        want = x @ b.weight.double().T
        if act:
            gate, up = want.chunk(2, dim=-1)
            want = torch.nn.functional.silu(gate) * up
        return float((b.out.double() - want).abs().max() / want.abs().max())


def parts_of(measured: list[dict[str, Any]]) -> dict[str, dict[str, list[tuple[int, list[int]]]]]:
    """The parts of the table that minisgl-cuda ships, from the measurements; [] where the form is slower."""
    parts: dict[str, dict[str, list[tuple[int, list[int]]]]] = {part: {} for part in FUSED_PARTS.values()}
    for row in measured:
        entry = parts[row["form"]].setdefault(f"{row['n']}x{row['k']}", [])
        entry.append((row["rows"], list(row["tile"]) if row["wins"] else []))
    return parts


def read_table(path: Path) -> dict[str, Any]:
    """Read a table. Raises :class:`UsageError` for a file that is not one."""
    try:
        found = json.loads(path.read_text())
        found["tiles"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"--table {path} holds no tiles: {error}", field="--table", value=str(path)) from error
    return dict(found)


def main() -> None:
    """Compile, measure, print, write."""
    parser = Parser(__doc__)
    parser.add_argument("--table", type=Path, help="the tiles of plain products, to which the fused ones are added")
    parser.add_argument("--out", type=output, default="skinny-sm90.json")
    parser.add_argument("--workers", type=positive, default=min(12, os.cpu_count() or 1), help="that compile")
    options = parser.parse_args()
    table = read_table(options.table) if options.table else {}
    need_gpu()
    works = [
        Work(n, k, rows, form)
        for (n, k), forms in SHAPES.items()
        for rows in ROWS
        for form in forms
        if rows == 1 or not form[0]
    ]
    jobs = [(work, tile) for work in works for tile in work.tiles()]
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        list(tqdm(pool.map(compile_tile, *zip(*jobs, strict=True), chunksize=4), total=len(jobs), desc="compiling"))
    bench, measured = Bench(), []
    for work in tqdm(works, desc="measuring"):
        row = bench.measure(work)
        measured.append(row)
        act_alone = f", {row['norm_then_act_us']:.2f} with the activation alone" if "norm_then_act_us" in row else ""
        print(
            f"{work.name}: fused {row['fused_us']:.2f} us {row['tile']} "
            f"({row['gigabytes'] / row['fused_us'] * 1e3:.2f} TB/s), separate {row['separate_us']:.2f} us{act_alone}, "
            f"error {row['error']:.1e}{'' if row['wins'] else ' (loses)'}"
        )
    keep({**table, **about(options), **parts_of(measured), "measured": measured}, options.out, indent=None)


if __name__ == "__main__":
    raise SystemExit(run(main))
