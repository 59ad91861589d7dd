"""ops:fused_route, its kernel in the interpreter on a CPU and compiled on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernels need triton")

from minisgl_cpu_sim.graph import EmulatedGraph
from minisgl_moe.routing import FusedRouting

SETUP: Any = None
ROUTING = FusedRouting(SETUP)


def expected(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower expert first on a tie: a stable descending sort."""
    ids = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = torch.softmax(logits.double(), dim=-1).gather(1, ids)
    if renormalize:
        weights /= weights.sum(-1, keepdim=True)
    return ids.int(), weights.float()


def check(logits: torch.Tensor, top_k: int, renormalize: bool) -> None:
    ids, weights = ROUTING.route(logits, top_k, renormalize)
    wanted_ids, wanted = expected(logits, top_k, renormalize)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("top_k", "renormalize", "weights"),
    [(2, False, [0.563021, 0.207124]), (2, True, [0.731059, 0.268941]), (1, True, [1.0])],
)
def test_case_71_norm_topk_prob(top_k: int, renormalize: bool, weights: list[float]) -> None:
    ids, found = ROUTING.route(torch.tensor([[2, 1, 0.5, 0, -1]]), top_k, renormalize)
    assert ids.tolist() == [[0, 1][:top_k]]
    torch.testing.assert_close(found, torch.tensor([weights]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 128, 8), (5, 60, 4), (3, 1, 1), (2, 5, 5), (2, 513, 3)])
def test_any_number_of_experts(dtype: torch.dtype, tokens: int, experts: int, top_k: int) -> None:
    wide = torch.randn(tokens, experts + 3, generator=torch.Generator().manual_seed(experts)).to(dtype)
    check(wide[:, :experts], top_k, renormalize=True)


def test_the_lower_expert_comes_first_on_a_tie() -> None:
    ids, weights = ROUTING.route(torch.tensor([[0.0, 1, -0.0, 1, 0, 1]]), 5, renormalize=False)
    assert ids.tolist() == [[1, 3, 5, 0, 2]]
    assert weights[0, :3].unique().numel() == weights[0, 3:].unique().numel() == 1


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's word for minus infinity
def test_extreme_logits() -> None:
    check(torch.tensor([[3e38, -3e38, 0.0, 1e-40], [-1e9, -2e9, -3e9, -1e30]]), 3, renormalize=False)


def test_a_nan_spoils_its_own_row_only_and_names_real_experts() -> None:
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    whole = ROUTING.route(logits, 4, renormalize=True)
    logits[1, 2] = torch.nan
    ids, weights = ROUTING.route(logits, 4, renormalize=True)
    assert weights[1].isnan().all()
    assert sorted(set(ids[1].tolist())) == sorted(ids[1].tolist()) and 0 <= min(ids[1]) <= max(ids[1]) < 6
    assert torch.equal(ids[[0, 2]], whole[0][[0, 2]]) and torch.equal(weights[[0, 2]], whole[1][[0, 2]])


def test_no_tokens() -> None:
    ids, weights = ROUTING.route(torch.empty(0, 4), 2, renormalize=True)
    assert ids.shape == weights.shape == (0, 2)


def test_a_replay_routes_anew() -> None:
    logits = torch.randn(2, 6)
    graph = EmulatedGraph.capture(lambda: ROUTING.route(logits, 2, True))
    logits.copy_(logits.flip(1))
    ids, weights = graph.replay()
    wanted_ids, wanted = expected(logits, 2, renormalize=True)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, atol=1e-6, rtol=1e-5)


@settings(max_examples=20, deadline=None)
@given(
    row=st.lists(st.floats(-50, 50, width=32) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=20),
    top_k=st.integers(1, 20),
    renormalize=st.booleans(),
)
def test_any_logits(row: list[float], top_k: int, renormalize: bool) -> None:
    check(torch.tensor([row]), min(top_k, len(row)), renormalize)
