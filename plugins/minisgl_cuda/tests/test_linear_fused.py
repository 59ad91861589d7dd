"""Products fused with the norm before and the activation behind, against float64: interpreted, or on a GPU."""

from __future__ import annotations

import json
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the skinny products need triton")

from minisgl_core.plugin_api import AddNorm, LinearSetup
from minisgl_cuda.linear import FUSED_PARTS, SkinnyLinear
from minisgl_cuda.options import SkinnyOptions
from minisgl_cuda.tiles import TileTable
from minisgl_cuda.triton_ops.dependent import DEPENDENT_LAUNCH
from minisgl_cuda.triton_ops.skinny import MAX_ROWS, default_tile, skinny_linear

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HAS_DEPENDENT_LAUNCHES = DEPENDENT_LAUNCH and ON_GPU and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = [pytest.mark.gpu] if ON_GPU else []

FORMS = [(rows, *form) for rows in (1, 2, 16) for form in FUSED_PARTS if rows == 1 or not form[0]]
EPS = 1e-6
RTOL = 1e-2 if ON_GPU else 3e-2
"""gate, up and their product are rounded to bfloat16; the interpreter truncates."""


def normed(total: torch.Tensor, norm_weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    wide = total.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm_weight.double()


def activated(wide: torch.Tensor) -> torch.Tensor:
    gate, up = wide.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def draw(rows: int, n: int, k: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(rows * 10_000 + n + k)
    shapes = {"x": (rows, k + 8), "residual": (rows, k + 16), "norm_weight": (k,), "weight": (n, k), "bias": (n,)}
    found = {name: torch.randn(shape).to(DEVICE, dtype) for name, shape in shapes.items()}
    found["weight"] /= k**0.5
    found["residual"] *= 4
    found |= {name: found[name][:, :k] for name in ("x", "residual")}
    if ON_GPU:
        torch.cuda.synchronize()  # a dependent launch does not wait for who writes the weight
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "norm", "act"), FORMS)
@pytest.mark.parametrize(("n", "k"), [(96, 256), (34, 100), (20, 2500)])
@pytest.mark.parametrize("dependent", [False, True] if HAS_DEPENDENT_LAUNCHES else [False])
def test_fused_product(dtype: torch.dtype, rows: int, norm: bool, act: bool, n: int, k: int, dependent: bool) -> None:
    d = draw(rows, n, k, dtype)
    out = torch.full((rows, n // 2 if act else n), torch.nan, dtype=dtype, device=DEVICE)
    total = torch.full((rows, k), torch.nan, dtype=dtype, device=DEVICE)
    given = (total, d["residual"], d["norm_weight"], EPS) if norm else (None, None, None, 0.0)
    before = {name: d[name].clone() for name in ("x", "residual")}
    skinny_linear(out, d["x"], d["weight"], d["bias"], *default_tile(rows, n, k), dependent, act, *given)
    x = d["x"].double()
    if norm:
        wanted = (d["x"].float() + d["residual"].float()).to(dtype)
        torch.testing.assert_close(total, wanted, atol=0, rtol=0 if ON_GPU else 2**-7)
        x = normed(total, d["norm_weight"])
    else:
        assert total.isnan().all()
    wide = x @ d["weight"].double().T + d["bias"].double()
    torch.testing.assert_close(out.double(), activated(wide) if act else wide, atol=3e-2, rtol=RTOL)
    assert all(torch.equal(d[name], kept) for name, kept in before.items())


def test_the_kernel_refuses_norms_of_several_rows() -> None:
    d = draw(2, 32, 64, torch.bfloat16)
    before = (torch.empty_like(d["x"]), d["residual"], d["norm_weight"], EPS)
    with pytest.raises(ValueError, match="a product of 2 rows cannot be fused with a norm"):
        skinny_linear(
            d["x"].new_empty(2, 32), d["x"], d["weight"], None, *default_tile(2, 32, 64), False, False, *before
        )


@pytest.mark.parametrize("rows", [1, 5])
def test_a_residual_too_large_to_be_multiplied_by_its_norm_weights(rows: int) -> None:
    """float16: large residuals times large norm_weights exceed 65,504 before the norm divides, not after."""
    d = draw(rows, 32, 128, torch.float16)
    residual, norm_weight = (d["residual"] * 2000).clamp(-30000, 30000), d["norm_weight"].abs() + 8
    ours = SkinnyLinear(LinearSetup(torch.device(DEVICE), torch.float16, 64))
    out, total = ours.forward_fused(
        d["x"], ours.prepare_weights(d["weight"]), None, AddNorm(residual, norm_weight, EPS), act=False
    )
    assert total is not None and (total.double() * norm_weight.double()).abs().amax() > 65504
    torch.testing.assert_close(out.double(), normed(total, norm_weight) @ d["weight"].double().T, atol=5e-2, rtol=1e-2)


@pytest.mark.parametrize(("norm", "act"), list(FUSED_PARTS))
@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_the_backend_is_right_for_any_number_of_rows(rows: int, norm: bool, act: bool) -> None:
    d = draw(rows, 48, 96, torch.bfloat16)
    ours = SkinnyLinear(LinearSetup(torch.device(DEVICE), torch.bfloat16, 64))
    before = AddNorm(d["residual"], d["norm_weight"], EPS) if norm else None
    out, total = ours.forward_fused(d["x"], ours.prepare_weights(d["weight"]), d["bias"], before, act)
    x = d["x"].double() if total is None else normed(total, d["norm_weight"])
    wide = x @ d["weight"].double().T + d["bias"].double()
    torch.testing.assert_close(out.double(), activated(wide) if act else wide, atol=3e-2, rtol=RTOL)
    assert (total is None) != norm


def test_the_table_decides_for_how_many_rows_operations_are_fused() -> None:
    few, more = [4, 256, 4, 2], [16, 128, 4, 3]
    table = TileTable({"64x32": [(1, few), (4, more), (8, []), (16, more)], "8x8": [(1, [])]})
    assert [table.most_rows(*shape) for shape in ((64, 32), (8, 8), (9, 9))] == [4, 0, 0]
    ours: Any = SkinnyLinear(LinearSetup(torch.device(DEVICE), torch.bfloat16, 64))
    ours._fused = dict.fromkeys(FUSED_PARTS, table)
    weights = {n: ours.prepare_weights(torch.zeros(n, k, device=DEVICE)) for n, k in ((64, 32), (8, 8), (9, 9))}
    assert [ours.fused_rows(weights[n], False, True) for n in (64, 8, 9)] == [4, 0, 0]
    assert [ours.fused_rows(weights[64], *form) for form in FUSED_PARTS] == [1, 4, 1]  # norms of one row only
    assert ours.fused_rows(weights[64], False, False) == 0


def test_operations_that_are_not_to_be_fused_are_not() -> None:
    setup = LinearSetup(torch.device(DEVICE), torch.bfloat16, 64)
    table = dict.fromkeys(FUSED_PARTS, TileTable({"64x32": [(1, [4, 256, 4, 2])]}))
    only: Any = SkinnyLinear(setup, SkinnyOptions(fuse=["act_and_mul"]))
    only._fused = table
    weights = only.prepare_weights(torch.zeros(64, 32, device=DEVICE))
    assert [only.fused_rows(weights, *form) for form in FUSED_PARTS] == [0, 1, 0]
    never: Any = SkinnyLinear(setup, SkinnyOptions(fuse=[]))
    never._fused = table
    assert [never.fused_rows(weights, *form) for form in FUSED_PARTS] == [0, 0, 0]


def test_fused_tiles_fit_into_shared_memory() -> None:
    shipped = json.loads((files("minisgl_cuda") / "tiles" / "skinny-sm90.json").read_text())
    for part in FUSED_PARTS.values():
        for rows, tile in [each for entry in shipped.get(part, {}).values() for each in entry if each[1]]:
            block_n, block_k, _, stages = tile
            assert rows <= MAX_ROWS and block_n % 2 == 0
            assert rows == 1 or (stages - 1) * (block_n + 16) * block_k * 2 <= 227 << 10


def test_a_table_of_fused_tiles_serves_its_own_compute_capability() -> None:
    platform: Any = SimpleNamespace(sm=89, synchronize=lambda: None)
    ours: Any = SkinnyLinear(LinearSetup(torch.device(DEVICE), torch.bfloat16, 64, platform))
    assert not any(table.most_rows(4096, 1024) for table in ours._fused.values())
    platform.sm = 90
    here: Any = SkinnyLinear(LinearSetup(torch.device(DEVICE), torch.bfloat16, 64, platform))
    assert here._fused[True, False].most_rows(4096, 1024) == 1
