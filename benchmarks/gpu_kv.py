"""Times KV store and vocabulary gather inside a CUDA graph: CUDA C++, Triton, torch.

    python benchmarks/gpu_kv.py [--out kv.json]

bfloat16, 8 kv heads of 128; bytes are those read and written. Without --out the JSON goes to $OUT if that is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from commandline import Parser, about, keep, need_gpu, output, run
from gpu_linear import graph_microseconds

from minisgl_core.builtin.platform import CudaPlatform
from minisgl_core.plugin_api import KVSetup
from minisgl_cuda.kv_cpp import CudaKVKernels
from minisgl_cuda.kv_triton import TritonKVKernels
from minisgl_cuda.launch import CompiledLauncher

HEADS, DIM, SLOTS, VOCAB = 8, 128, 65536, 151936
TOKENS = (1, 16, 64, 256, 2048, 16384)
WIDTHS = (1024, 5120)
BUFFERS = 4
"""Buffers used in turn, so that small sizes do not run from the L2 cache."""
ROUNDS = 16
"""Rounds through the buffers in one graph, so that its own launch does not count."""


class TorchKV:
    """Indexed writes and reads."""

    def store(self, k_cache: Any, v_cache: Any, k: Any, v: Any, out_loc: Any) -> None:
        """k and v to slots."""
        k_cache.flatten(0, 1)[out_loc] = k
        v_cache.flatten(0, 1)[out_loc] = v

    def index(self, table: Any, ids: Any, start: int, rows: int) -> Any:
        """Rows of the table, zeros for foreign ids."""
        local = ids - start
        foreign = (local < 0) | (local >= rows)
        return table[local.masked_fill(foreign, 0)].masked_fill_(foreign[:, None], 0)


class TorchCopy:
    """The same bytes without an index: the memory's limit."""

    def store(self, k_cache: Any, v_cache: Any, k: Any, v: Any, out_loc: Any) -> None:
        """k and v to the first slots."""
        k_cache.flatten(0, 1)[: len(k)].copy_(k)
        v_cache.flatten(0, 1)[: len(v)].copy_(v)

    def index(self, table: Any, ids: Any, start: int, rows: int) -> Any:
        """The first rows."""
        return table[: len(ids)].clone()


def store_case(kv: Any, tokens: int) -> tuple[float, int]:
    """(microseconds, bytes)"""
    caches = [torch.zeros(2, SLOTS, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(BUFFERS)]
    wide = [torch.randn(tokens, 4 * HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(BUFFERS)]
    out_loc = torch.randperm(SLOTS, device="cuda")[:tokens].to(torch.int32)
    calls: list[Callable[[], Any]] = [
        lambda i=i: kv.store(*caches[i], wide[i][:, 2 * HEADS : 3 * HEADS], wide[i][:, 3 * HEADS :], out_loc)  # type: ignore[misc]
        for i in range(BUFFERS)
    ]
    return graph_microseconds(calls * ROUNDS), 2 * 2 * tokens * HEADS * DIM * 2


def index_case(kv: Any, tokens: int, width: int) -> tuple[float, int]:
    """(microseconds, bytes); half of the ids are another rank's."""
    table = torch.randn(VOCAB // 2, width, device="cuda", dtype=torch.bfloat16)
    ids = [torch.randint(0, VOCAB, (tokens,), device="cuda", dtype=torch.int32) for _ in range(BUFFERS)]
    mine = sum(int((i < VOCAB // 2).sum()) for i in ids) / BUFFERS
    calls: list[Callable[[], Any]] = [lambda i=i: kv.index(table, ids[i], 0, VOCAB // 2) for i in range(BUFFERS)]  # type: ignore[misc]
    return graph_microseconds(calls * ROUNDS), int((mine + tokens) * width * 2)


def main() -> None:
    """Every case; print a table, write the JSON."""
    parser = Parser(__doc__)
    out_dir = os.environ.get("OUT")
    parser.add_argument("--out", type=output, default=f"{out_dir}/kv.json" if out_dir else None)
    options = parser.parse_args()
    need_gpu()
    platform = CudaPlatform(0)
    platform.activate()
    setup = KVSetup(platform.device, torch.bfloat16, torch.bfloat16, 1, HEADS, DIM, platform)
    backends: dict[str, Any] = {
        "cpp": CudaKVKernels(setup),
        "cpp, no PDL": CudaKVKernels(setup, launcher=CompiledLauncher(platform, dependent=False)),
        "triton": TritonKVKernels(setup),
        "torch": TorchKV(),
        "torch copy": TorchCopy(),
    }
    cases: list[tuple[str, Callable[[Any], tuple[float, int]]]] = [
        (f"store {tokens} x {HEADS} x {DIM}", lambda kv, t=tokens: store_case(kv, t))  # type: ignore[misc]
        for tokens in TOKENS
    ]
    cases += [
        (f"index {tokens} x {width}", lambda kv, t=tokens, w=width: index_case(kv, t, w))  # type: ignore[misc]
        for width in WIDTHS
        for tokens in TOKENS
    ]
    rows = []
    print(f"{'':24s}" + "".join(f"{name:>22s}" for name in backends))
    for name, case in cases:
        line = f"{name:24s}"
        for backend, kv in backends.items():
            us, size = case(kv)
            rows.append({"case": name, "backend": backend, "us": us, "bytes": size, "tb_s": size / us / 1e6})
            line += f"{us:11.2f} us {size / us / 1e6:4.2f} TB/s"
        print(line)
    if options.out is not None:
        keep({**about(options), "rows": rows}, options.out)


if __name__ == "__main__":
    raise SystemExit(run(main))
