"""moe:fused, its Triton kernels in the interpreter, against the float64 sum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernels need triton")

from minisgl_cpu_sim.graph import EmulatedGraph
from minisgl_moe import executor as module
from minisgl_moe.executor import FusedMoE
from minisgl_moe.options import FusedMoEOptions
from minisgl_moe.tiles import Tile, Tiling, dump_table

Make = Callable[..., Any]
PAIRS = Tiling(False, Tile(1, 16, 32, warps=1), Tile(1, 16, 16, warps=1))
TILINGS = {
    "pairs": PAIRS,
    "pairs, uneven": Tiling(False, Tile(1, 32, 64), Tile(1, 16, 128)),
    "plain": Tiling(True, Tile(16, 32, 32, group_m=2), Tile(16, 16, 16, group_m=1)),
    "swapped": Tiling(True, Tile(16, 32, 16, swap=1), Tile(16, 64, 32, swap=1)),
    "descriptors": Tiling(True, Tile(32, 32, 32, tma=1), Tile(32, 32, 32, tma=1)),
    "swapped descriptors": Tiling(True, Tile(16, 64, 64, swap=1, tma=1), Tile(16, 64, 64, swap=1, tma=1)),
}


def with_tiling(monkeypatch: pytest.MonkeyPatch, tiling: Tiling) -> None:
    monkeypatch.setattr(module, "tiling_at", lambda *args: tiling)


def run(layer: Any, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Checks the sum, and that a workspace full of NaN and an input that is a view do not matter."""
    moe = FusedMoE(layer.setup())
    moe._inner.fill_(torch.nan)
    moe._rows.fill_(torch.nan)
    before = x.clone()
    out = moe.forward(x, ids, shares, moe.prepare_weights(0, layer.w13, layer.w2), 0)
    assert out.dtype == x.dtype
    assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0)), "the input was changed"
    moe.close()
    return out


def check(layer: Any, tokens: int, ids: torch.Tensor | None = None) -> None:
    x = layer.randn(tokens, layer.hidden + 4)[:, : layer.hidden]
    ids, shares = layer.ids(tokens) if ids is None else ids, layer.shares(tokens)
    tolerance = 1e-5 if layer.dtype == torch.float32 else 2e-2
    expected = layer.expected(x, ids, shares)
    torch.testing.assert_close(run(layer, x, ids, shares).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
def test_each_kind_of_tile(layer: Make, monkeypatch: pytest.MonkeyPatch, tiling: Tiling) -> None:
    """Widths that no block divides, several blocks of one expert, experts without tokens, padding."""
    with_tiling(monkeypatch, tiling)
    made = layer(experts=5, top_k=2, hidden=40, inner=24)
    tokens = 23 if tiling.grouped else 5
    ids = made.ids(tokens)
    ids[: tokens - 2] = torch.tensor([3, 1])
    ids[1], ids[2, 0] = -1, -1
    check(made, tokens, ids)


@pytest.mark.parametrize(("tokens", "group"), [(40, 2), (48, 8), (144, 8)])
def test_every_column_of_a_partial_last_group_is_written(
    layer: Make, monkeypatch: pytest.MonkeyPatch, tokens: int, group: int
) -> None:
    """One expert with whole blocks, or nearly: the grid has no program to spare, and the workspace holds NaN."""
    tile = Tile(16, 16, 32, group_m=group)
    with_tiling(monkeypatch, Tiling(True, tile, tile))
    made = layer(experts=1, top_k=1, hidden=32, inner=24, max_tokens=tokens)
    assert -(-tokens // 16) % group != 0
    check(made, tokens)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 128, 8), (4, 1, 1), (7, 5, 1), (9, 60, 4), (70, 3, 2)])
def test_case_72_any_grouping_is_the_dense_sum(layer: Make, tokens: int, experts: int, top_k: int) -> None:
    check(layer(experts, top_k, hidden=32, inner=16, max_tokens=tokens), tokens)


@pytest.mark.parametrize("tiling", [PAIRS, TILINGS["plain"]], ids=["pairs", "grouped"])
def test_case_72_an_expert_without_tokens_is_never_read(
    layer: Make, monkeypatch: pytest.MonkeyPatch, tiling: Tiling
) -> None:
    with_tiling(monkeypatch, tiling)
    made = layer(experts=4, top_k=1, hidden=32, inner=16)
    made.w13[[0, 1, 3]], made.w2[[0, 1, 3]] = torch.nan, torch.nan
    ids = torch.full((5, 1), 2, dtype=torch.int32)
    assert run(made, made.randn(5, 32), ids, made.shares(5)).isfinite().all()


@pytest.mark.parametrize("tiling", [PAIRS, TILINGS["plain"]], ids=["pairs", "grouped"])
def test_case_75_padding_contributes_nothing(layer: Make, monkeypatch: pytest.MonkeyPatch, tiling: Tiling) -> None:
    with_tiling(monkeypatch, tiling)
    made = layer(experts=6, top_k=3, hidden=32, inner=16)
    x, ids, shares = made.randn(8, 32), made.ids(8), made.shares(8)
    ids[2], ids[5, 1:], ids[7] = -1, -1, -1
    x[7], shares[7] = torch.nan, torch.nan  # nothing of a padding row is read
    out = run(made, x, ids, shares)
    assert torch.equal(out[[2, 7]], torch.zeros(2, 32))
    real = [0, 1, 3, 4, 5, 6]
    torch.testing.assert_close(
        out[real].double(), made.expected(x[real], ids[real], shares[real]), atol=1e-5, rtol=1e-5
    )


def test_only_padding_and_no_tokens(layer: Make) -> None:
    made = layer(experts=3, top_k=2, hidden=32, inner=16)
    ids = torch.full((3, 2), -1, dtype=torch.int32)
    assert torch.equal(run(made, made.randn(3, 32), ids, made.shares(3)), torch.zeros(3, 32))
    assert run(made, made.randn(0, 32), ids[:0], made.shares(0)).shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 12])
def test_half_precision(layer: Make, dtype: torch.dtype, tokens: int) -> None:
    check(layer(experts=4, top_k=2, hidden=64, inner=48, dtype=dtype), tokens)


def test_more_tokens_than_the_workspace_holds(layer: Make) -> None:
    check(layer(experts=3, top_k=2, hidden=16, inner=16, max_tokens=10), 27)


def test_equal_input_gives_equal_bits(layer: Make) -> None:
    made = layer(experts=4, top_k=2, hidden=32, inner=16)
    x, ids, shares = made.randn(20, 32), made.ids(20), made.shares(20)
    assert torch.equal(run(made, x, ids, shares), run(made, x, ids, shares))


@settings(max_examples=8, deadline=None)
@given(
    tokens=st.integers(1, 30),
    experts=st.integers(1, 7),
    top_k=st.integers(1, 3),
    hidden=st.integers(1, 50),
    inner=st.integers(1, 50),
)
def test_any_shape(layer: Make, tokens: int, experts: int, top_k: int, hidden: int, inner: int) -> None:
    check(layer(experts, min(top_k, experts), hidden, inner), tokens)


@pytest.mark.parametrize("tiling", [PAIRS, TILINGS["plain"]], ids=["pairs", "grouped"])
def test_a_replay_follows_new_routing(layer: Make, monkeypatch: pytest.MonkeyPatch, tiling: Tiling) -> None:
    with_tiling(monkeypatch, tiling)
    made = layer(experts=5, top_k=2, hidden=32, inner=16)
    moe = FusedMoE(made.setup())
    weights = moe.prepare_weights(0, made.w13, made.w2)
    x, ids, shares = made.randn(6, 32), made.ids(6), made.shares(6)
    graph = EmulatedGraph.capture(lambda: moe.forward(x, ids, shares, weights, 0))
    for last in ([0, 1], [3, -1], [-1, -1]):
        x.copy_(made.randn(6, 32))
        ids.copy_(made.ids(6))
        ids[-1] = torch.tensor(last)
        out: Any = graph.replay()
        torch.testing.assert_close(out.double(), made.expected(x, ids, shares), atol=1e-5, rtol=1e-5)


def test_weights_other_than_announced_are_refused(layer: Make) -> None:
    made = layer(experts=2, top_k=1, hidden=32, inner=16)
    moe = FusedMoE(made.setup())
    with pytest.raises(ValueError, match=r"w13 \(2, 32, 32\) of torch.float32, layer 3 has \(2, 32, 31\)"):
        moe.prepare_weights(3, made.w13[..., :31], made.w2)
    with pytest.raises(ValueError, match="float16"):
        moe.prepare_weights(0, made.w13, made.w2.half())
    with pytest.raises(TypeError, match="bfloat16 activations"):
        moe.forward(made.randn(1, 32).bfloat16(), made.ids(1), made.shares(1), (made.w13, made.w2), 0)


def test_a_table_of_ones_own_is_used(layer: Make, tmp_path: Path) -> None:
    made = layer(experts=4, top_k=2, hidden=32, inner=16)
    moe = FusedMoE(made.setup())
    assert moe._table is None
    (tmp_path / moe._geometry.file_name).write_text(dump_table({8: TILINGS["swapped"]}))
    moe = FusedMoE(made.setup(), FusedMoEOptions(tiles=tmp_path))
    assert moe._table is not None and moe._table.at(100) == TILINGS["swapped"]
    x, ids, shares = made.randn(5, 32), made.ids(5), made.shares(5)
    out = moe.forward(x, ids, shares, moe.prepare_weights(0, made.w13, made.w2), 0)
    torch.testing.assert_close(out.double(), made.expected(x, ids, shares), atol=1e-5, rtol=1e-5)
