"""What benchmarks, their documents and shipped measurements claim."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.modelconfig.geometries import geometry

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


# ---- 139: weights that were not measured -----------------------------------------------------------------------------

MEASURED = {(row["n"], row["k"], row["rows"]): row for row in result("gpu_linear_h200.json")["measured"]}


def without(shape: tuple[int, int] | None = None) -> Any:
    """The shipped table, as it would be if ``shape`` had not been measured."""
    tiles = pytest.importorskip("minisgl_cuda.tiles")
    entries = result("gpu_linear_h200.json")["tiles"]
    return tiles.TileTable(
        {name: rows for name, rows in entries.items() if shape is None or name != "{}x{}".format(*shape)}
    )


@pytest.mark.parametrize(("n", "k", "rows"), MEASURED, ids=str)
def test_case_139_the_rule_for_unmeasured_weights_never_loses_to_cublas(n: int, k: int, rows: int) -> None:
    """Each measured weight is left out in turn: what the others say of it must not be slower than what it showed."""
    row = MEASURED[n, k, rows]
    if without((n, k)).choose(n, k, rows):
        assert row["skinny_us"] < row["cublas_us"]


@pytest.mark.parametrize(
    ("n", "k", "rows", "tile"),
    [
        (5120, 5120, 1, []),  # measured: cuBLAS is faster
        (1024, 2048, 8, [16, 256, 4, 5]),  # measured
        (2560, 4096, 1, [4, 512, 4, 2]),  # like 5120x2048, 2048x4096 and 6144x1024, which all gain
        (2560, 4096, 2, []),  # several rows: nothing is guessed
        (6144, 4096, 1, []),  # as large as 5120x5120, which loses
        (4096, 4096, 1, []),  # between those that gain and 5120x5120
        (64, 64, 1, []),  # smaller than anything measured
        (128, 2000, 1, []),  # only one like it was measured
    ],
)
def test_case_139_weights_of_other_models(n: int, k: int, rows: int, tile: list[int]) -> None:
    assert without().choose(n, k, rows) == tile


def test_case_139_a_device_without_measurements_uses_the_library() -> None:
    tiles = pytest.importorskip("minisgl_cuda.tiles")
    assert [tiles.TileTable.load("skinny-sm89").choose(2560, 4096, rows) for rows in (1, 4, 16)] == [[], [], []]


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-14b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-4b"])
def test_case_139_the_next_measurement_covers_the_weights_of_other_models(name: str) -> None:
    pytest.importorskip("triton")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from gpu_linear import MODELS, shapes_of
    from gpu_linear_fused import SHAPES as FUSED

    c = geometry(name)
    heads, hidden = c.num_q_heads * c.head_dim, c.hidden_size
    qkv = (heads + 2 * c.num_kv_heads * c.head_dim, hidden)
    gate_up = (2 * c.intermediate_size, hidden)
    assert {qkv, (hidden, heads), gate_up, (hidden, c.intermediate_size), (c.vocab_size, hidden)} <= set(
        shapes_of(name)
    )
    assert {qkv, gate_up} <= set(FUSED) and name in MODELS
