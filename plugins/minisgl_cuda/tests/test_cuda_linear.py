"""linear:skinny against float64: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the skinny products need triton")

from minisgl_core.plugin_api import CannotRun, LinearSetup
from minisgl_cuda.linear import SkinnyLinear
from minisgl_cuda.options import SkinnyOptions
from minisgl_cuda.tiles import TileTable
from minisgl_cuda.triton_ops.dependent import DEPENDENT_LAUNCH
from minisgl_cuda.triton_ops.skinny import ahead, default_tile, skinny_linear

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HAS_DEPENDENT_LAUNCHES = DEPENDENT_LAUNCH and ON_GPU and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = [pytest.mark.gpu] if ON_GPU else []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(("n", "k"), [(96, 256), (33, 100), (300, 1024), (20, 5120)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dependent", [False, True] if HAS_DEPENDENT_LAUNCHES else [False])
def test_product(dtype: torch.dtype, rows: int, n: int, k: int, bias: bool, dependent: bool) -> None:
    x = torch.randn(rows, k + 8).to(DEVICE, dtype)[:, :k]
    weight = (torch.randn(n, k) / k**0.5).to(DEVICE, dtype)
    add = torch.randn(n).to(DEVICE, dtype) if bias else None
    out = torch.full((rows, n), torch.nan, dtype=dtype, device=DEVICE)
    if ON_GPU:
        torch.cuda.synchronize()  # a dependent launch does not wait for who writes the weight
    skinny_linear(out, x, weight, add, *default_tile(rows, n, k), dependent)
    expected = x.double() @ weight.double().T + (0 if add is None else add.double())
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=1e-2)


def test_the_table_decides_and_more_rows_go_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TileTable({"64x128": [(1, [16, 128, 4, 2]), (8, [])]})
    assert table.find(64, 128, 1) == [16, 128, 4, 2]
    assert table.find(64, 128, 2) == [] and table.find(64, 128, 9) is None and table.find(64, 64, 1) is None
    calls: list[int] = []
    monkeypatch.setattr("minisgl_cuda.linear.skinny_linear", lambda out, x, *rest: calls.append(len(x)))
    ours: Any = SkinnyLinear(LinearSetup(torch.device(DEVICE), torch.float32, 64))
    ours._tiles = table
    weight = torch.randn(64, 128, device=DEVICE)
    for rows in (1, 2, 9, 17):
        ours.forward(torch.randn(rows, 128, device=DEVICE), ours.prepare_weights(weight))
    assert calls == [1]  # 2: measured slower; 9: not measured; 17: too many


def _shared_bytes(rows: int, tile: Sequence[int]) -> int:
    """What triton 3.9 compiles the kernel for several rows to, on 8.0 to 12.0; that for one row needs next to none."""
    block_n, block_k, _, stages = tile
    return 0 if rows == 1 else (stages - 1) * (block_n + 16) * block_k * 2


def test_tiles_fit_into_the_shared_memory_of_their_devices() -> None:
    shipped = json.loads((files("minisgl_cuda") / "tiles" / "skinny-sm90.json").read_text())["tiles"]
    measured = [(rows, tile) for entry in shipped.values() for rows, tile in entry if tile]
    assert max(_shared_bytes(*each) for each in measured) <= 227 << 10
    guessed = [(rows, default_tile(rows, n, k)) for rows in (1, 2, 16) for n in (16, 1024, 152064) for k in (64, 17408)]
    assert max(_shared_bytes(*each) for each in guessed) <= 99 << 10  # of 8.6, 8.9 and 12.0


@pytest.mark.parametrize(("sm", "measured"), [(90, True), (89, False)])
def test_a_table_serves_its_own_compute_capability(sm: int, measured: bool) -> None:
    platform: Any = SimpleNamespace(sm=sm, synchronize=lambda: None)
    ours: Any = SkinnyLinear(LinearSetup(torch.device(DEVICE), torch.bfloat16, 64, platform))
    assert (ours._tiles.find(7168, 5120, 4) is not None) is measured


@pytest.mark.parametrize(
    ("tile", "k", "elements"),
    [
        ((4, 1024, 8, 3), 3072, 2048),  # whole powers of two
        ((4, 1024, 4, 3), 1024, 1024),
        ((4, 512, 8, 3), 5120, 4096),
        ((4, 512, 4, 3), 5120, 2048),  # as many registers as a thread can spare
        ((32, 256, 4, 2), 4096, 256),  # never less than a step
        ((4, 256, 4, 2), 100, 256),
    ],
)
def test_what_is_loaded_ahead_of_x(tile: tuple[int, int, int, int], k: int, elements: int) -> None:
    assert ahead(*tile[:3], k) == elements


def test_weights_are_written_before_a_dependent_launch_reads_them() -> None:
    seen: list[str] = []
    platform: Any = SimpleNamespace(sm=90, synchronize=lambda: seen.append("waited"))
    SkinnyLinear(LinearSetup(torch.device(DEVICE), torch.bfloat16, 64, platform)).prepare_weights(torch.zeros(4, 4))
    assert seen == ["waited"]


def test_dependent_launches_are_refused_where_the_gpu_has_none() -> None:
    platform: Any = SimpleNamespace(sm=80)
    setup = LinearSetup(torch.device(DEVICE), torch.bfloat16, 64, platform)
    with pytest.raises(CannotRun, match=r"dependent_launch: wanted .*9\.0.*supported 8\.0"):
        SkinnyLinear(setup, SkinnyOptions(dependent_launch=True))
    assert SkinnyLinear(setup)._dependent is False
    unknown = LinearSetup(torch.device(DEVICE), torch.bfloat16, 64)
    with pytest.raises(CannotRun, match=r"dependent_launch: wanted .*9\.0.*supported no known GPU, and Triton "):
        SkinnyLinear(unknown, SkinnyOptions(dependent_launch=True))
    assert SkinnyLinear(unknown)._dependent is False
