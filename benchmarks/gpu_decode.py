"""Times paged decode attention inside a CUDA graph: minisgl's cuda_decode over batch sizes and lengths.

    python benchmarks/gpu_decode.py --out decode.json

16 query and 8 kv heads of 128, bfloat16; bytes are the keys and values that must be read.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_linear import graph_microseconds

from minisgl_core.plugin_api import AttentionSetup, BatchView, LayerFacts
from minisgl_cuda.attention import CudaDecodeAttention
from minisgl_cuda.options import DecodeOptions

Q_HEADS, KV_HEADS, DIM = 16, 8, 128
LAYERS = 4
"""Caches in turn, so that small batches do not run from the L2 cache alone."""


def case(batch: int, length: int, page: int, options: dict[str, Any]) -> float:
    """Microseconds of one layer's attention."""
    pages = -(-length // page)
    total = batch * pages
    caches = [
        torch.randn(2, total + 1, page, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)
    ]
    order = torch.randperm(total, device="cuda", dtype=torch.int32).view(batch, pages)
    view = BatchView(
        None, None, 1, 40960, torch.arange(batch + 1, device="cuda", dtype=torch.int32),
        torch.full((batch,), length, device="cuda", dtype=torch.int32), order, page,
    )  # fmt: skip
    view.page_table_device, view.table_idx_device = view.slot_table()  # as the engine has them at hand
    pool: Any = SimpleNamespace(k_cache=lambda i: caches[i][0], v_cache=lambda i: caches[i][1])
    setup = AttentionSetup(
        torch.device("cuda"), torch.bfloat16, torch.bfloat16, "NHD", page, Q_HEADS, KV_HEADS, DIM,
        (LayerFacts(DIM**-0.5),) * LAYERS, batch, 8192, 40960, 2, SimpleNamespace(),  # type: ignore[arg-type]
    )  # fmt: skip
    backend = CudaDecodeAttention(setup, DecodeOptions(**options))
    backend.bind_kv(pool)
    q = torch.randn(batch, Q_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    fake: Any = SimpleNamespace(view=view)
    return graph_microseconds([lambda i=i: backend.forward(q, q, q, i, fake) for i in range(LAYERS)])  # type: ignore[misc]


def main() -> None:
    """Every case; print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("decode.json"))
    out = parser.parse_args().out
    found = []
    for batch, length, page in itertools.product((1, 8, 64, 256), (128, 1024, 4096), (1, 16)):
        if batch * length > 300_000:
            continue
        for block, programs in itertools.product((32, 64, 128), (264, 528, 1056)):
            took = case(batch, length, page, {"block_tokens": block, "programs": programs})
            rate = batch * length * KV_HEADS * DIM * 4 / took / 1e6
            found.append(
                {"batch": batch, "length": length, "page": page, "block": block, "programs": programs, "us": took,
                 "tb_s": rate}
            )  # fmt: skip
        best = min(
            (r for r in found if (r["batch"], r["length"], r["page"]) == (batch, length, page)), key=lambda r: r["us"]
        )
        print(best)
    out.write_text(
        json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": found}) + "\n"
    )


if __name__ == "__main__":
    main()
