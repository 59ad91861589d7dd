"""The search for tiles writes what the executor reads. Its timings are made up here: they need a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from minisgl_core.bench.provenance import provenance
from minisgl_core.plugin_api import MoESetup
from minisgl_moe import executor
from minisgl_moe.executor import FusedMoE, FusedWeights
from minisgl_moe.tiles import Geometry, default_tiling, load_table, tiling_at

HOPPER: Any = SimpleNamespace(sm=90)
SMALL = Geometry(90, "bfloat16", experts=4, top_k=2, inner=16, hidden=32)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/gpu_moe.py as if on an H200."""
    path = Path(__file__).parents[3] / "benchmarks" / "gpu_moe.py"
    spec = importlib.util.spec_from_file_location("gpu_moe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_moe", module)
    monkeypatch.syspath_prepend(path.parent)  # as for a script
    spec.loader.exec_module(module)

    def layers(geometry: Geometry, count: int) -> list[FusedWeights]:
        w13 = torch.zeros(geometry.experts, 2 * geometry.inner, geometry.hidden, dtype=torch.bfloat16)
        w2 = torch.zeros(geometry.experts, geometry.hidden, geometry.inner, dtype=torch.bfloat16)
        return [FusedWeights(w13, w2)] * count

    def whole(work: Any, tiling: Any) -> tuple[float, torch.Tensor]:
        return 2e-6, torch.arange(4.0)

    def seconds(run: Any) -> float:  # narrow, deep tiles shall be the fastest
        return float(run.args[1].block_n) / run.args[1].stages if len(run.args) == 2 else 0.0

    monkeypatch.setattr(module, "CudaPlatform", lambda index: HOPPER)
    monkeypatch.setattr(module, "need_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(module, "compile_all", lambda geometry, jobs, budget: set(jobs))
    for name, fake in (("random_layers", layers), ("whole", whole), ("seconds", seconds)):
        monkeypatch.setattr(module, name, fake)
    return module


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> None:
    shape = ("--experts", "4", "--top-k", "2", "--inner", "16", "--hidden", "32")
    monkeypatch.setattr(sys, "argv", ["gpu_moe.py", *shape, "--out", str(out), *more])
    module.main()


def test_the_executor_reads_what_the_search_writes(
    search: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(search, monkeypatch, tmp_path, "--tokens", "1", "64", "4096")
    assert {path.name for path in tmp_path.iterdir()} == {"sm90-bfloat16-e4-k2-i16-h32.json", "gpu_moe.json"}
    table = load_table(SMALL, (tmp_path,))
    assert table is not None and table.tokens == (1, 64, 4096)
    one, many = tiling_at(SMALL, 1, table), tiling_at(SMALL, 4096, table)
    assert not one.grouped and one.up.block_n == min(tile.block_n for tile in search.pair_tiles())
    assert many.grouped and (many.up.block_n, many.up.stages) == (128, 4)
    monkeypatch.setattr(executor, "SHIPPED", tmp_path)
    moe = FusedMoE(MoESetup(torch.device("cpu"), torch.bfloat16, 4, 2, 32, 16, 1, 8, HOPPER))
    assert moe._table == table
    report = json.loads((tmp_path / "gpu_moe.json").read_text())
    assert report["device"] == provenance()["device"] and [row["tokens"] for row in report["rows"]] == [1, 4096, 64]


def test_each_number_of_tokens_is_kept_when_it_is_found(
    search: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = search.row_of

    def breaks(work: Any, *tilings: Any) -> dict[str, Any]:
        if work.tokens == 64:
            raise RuntimeError("the device is gone")
        row: dict[str, Any] = found(work, *tilings)
        return row

    monkeypatch.setattr(search, "row_of", breaks)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(search, monkeypatch, tmp_path, "--tokens", "1", "64", "4096")
    table = load_table(SMALL, (tmp_path,))
    assert table is not None and table.tokens == (1, 4096)


def test_no_number_of_tokens_begins_when_time_is_over(
    search: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(search, monkeypatch, tmp_path, "--tokens", "1", "2", "--seconds", "0")
    assert capsys.readouterr().out.count("no time left for") == 2 and list(tmp_path.iterdir()) == []


def test_without_a_compiled_candidate_the_rule_serves(
    search: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(search, "compile_all", lambda *args: set())
    run(search, monkeypatch, tmp_path, "--tokens", "256")
    assert tiling_at(SMALL, 256, load_table(SMALL, (tmp_path,))) == default_tiling(SMALL, 256)
