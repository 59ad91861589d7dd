"""The op ``sample`` of ops:cpu, against the core's composed one and against counts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.builtin.ops import ComposedOps, filter_mask
from minisgl_core.plugin_api import SampleArgs, SamplingMode
from minisgl_cpu_sim.native.ops import NativeOps

FACTS: Any = SimpleNamespace(q_heads=1, kv_heads=1, head_dim=8, comm=SimpleNamespace(all_reduce=None))
NATIVE, COMPOSED = NativeOps(FACTS), ComposedOps(FACTS)


def make_args(
    rows: int,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    seed: int = 7,
) -> SampleArgs:
    """Columns of one table, as the core keeps them."""

    def column(value: Any, dtype: torch.dtype) -> torch.Tensor:
        table = torch.full((rows, 3), -1, dtype=dtype)
        table[:, 1] = torch.as_tensor(value, dtype=dtype)
        return table[:, 1]

    floats = [column(value, torch.float32) for value in (temperature, top_p, min_p)]
    seeds = [column([seed * 1103515245 % 2**31 + 97 * row for row in range(rows)], torch.int32) for _ in range(2)]
    return SampleArgs(
        floats[0], column(top_k, torch.int32), floats[1], floats[2], seeds[0], -seeds[1], column(5, torch.int32)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 7, 8, 500, 5003])
def test_greedy_is_the_first_largest(dtype: torch.dtype, vocab: int) -> None:
    logits = torch.randint(-3, 4, (20, vocab)).to(dtype)  # ties in every row
    out = NATIVE.sample(logits, make_args(20), "greedy")
    top = logits.amax(-1, keepdim=True)
    assert out.dtype == torch.int32
    assert torch.equal(out.long(), (logits == top).int().argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["random", "filtered"])
@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
def test_same_tokens_as_the_composed_operation(dtype: torch.dtype, mode: SamplingMode, scale: float) -> None:
    rows, vocab = 96, 3001
    random = torch.Generator().manual_seed(3)
    logits = (torch.randn(rows, vocab, generator=random) * scale).to(dtype)
    args = make_args(
        rows,
        temperature=[0.0 if row % 5 == 0 else 0.4 + row / 50 for row in range(rows)],
        top_k=[(0, 1, 5, 50, 5000)[row % 5] for row in range(rows)],
        top_p=[(1.0, 0.9, 0.3)[row % 3] for row in range(rows)],
        min_p=[(0.0, 0.05, 0.0, 0.3)[row % 4] for row in range(rows)],
    )
    assert torch.equal(NATIVE.sample(logits, args, mode), COMPOSED.sample(logits, args, mode))


def test_random_rows_follow_the_softmax() -> None:
    rows = 6000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, -math.inf]).repeat(rows, 1)
    out = NATIVE.sample(logits, make_args(rows, temperature=0.7), "random")
    shares = torch.bincount(out.long(), minlength=5) / rows
    torch.testing.assert_close(shares, torch.softmax(logits[0] / 0.7, -1), atol=0.02, rtol=0)
    assert shares[4] == 0


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.sampled_from((-2.0, -1.0, 0.0, 0.5, 1.0)), min_size=1, max_size=40),
    top_k=st.integers(0, 50),
    top_p=st.sampled_from((0.0, 1e-9, 0.2, 0.5, 0.999, 1.0)),
    min_p=st.sampled_from((0.0, 0.1, 0.7, 1.0)),
)
def test_only_and_all_kept_tokens_are_drawn(values: list[float], top_k: int, top_p: float, min_p: float) -> None:
    # Ties are the rule here; 0.1 % off the multiples of 1/n keeps sums away from the limits, where float32 may err.
    rows = 300
    logits = torch.tensor([values]).repeat(rows, 1)
    top_p = top_p if top_p in (0.0, 1.0) else top_p * 0.99917
    args = make_args(rows, 1.0, top_k, top_p, min_p)
    out = NATIVE.sample(logits, args, "filtered")
    kept = filter_mask(torch.softmax(logits[:1], -1), args.top_k[:1], args.top_p[:1], args.min_p[:1])[0]
    assert kept[out.long()].all()
    likely = kept & (torch.softmax(logits[0].masked_fill(~kept, -math.inf), -1) > 0.05)
    assert set(likely.nonzero().flatten().tolist()) <= set(out.tolist())


def test_ties_at_the_kth_probability_are_all_kept() -> None:
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0, 0.0]).repeat(400, 1)
    assert set(NATIVE.sample(logits, make_args(400, 5.0, top_k=2), "filtered").tolist()) == {0, 2, 3, 4}


def test_top_p_counts_what_top_k_left() -> None:
    # 0.5 0.3 0.2: of the first two, the first alone holds 0.625 of what is left.
    logits = torch.tensor([0.5, 0.3, 0.2]).log().repeat(400, 1)
    drawn = NATIVE.sample(logits, make_args(400, 1.0, top_k=2, top_p=0.62), "filtered")
    assert set(drawn.tolist()) == {0}
    drawn = NATIVE.sample(logits, make_args(400, 1.0, top_k=2, top_p=0.63), "filtered")
    assert set(drawn.tolist()) == {0, 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1e-5, 1e-8, 1e-38])
@pytest.mark.parametrize("mode", ["random", "filtered"])
def test_case_38_tiny_temperature(dtype: torch.dtype, temperature: float, mode: SamplingMode) -> None:
    logits = torch.tensor([[2.875, 2.955, 11.0625]]).to(dtype)
    assert NATIVE.sample(logits, make_args(1, temperature, top_p=0.9), mode).tolist() == [2]


@pytest.mark.parametrize(
    ("top_k", "top_p", "argmax"),
    [(2**30, 1.0, False), (100, 1.0, False), (0, 0.0, True), (0, 1e-9, True), (1, 1.0, True), (2**31 - 1, 1e-9, True)],
)
def test_case_42_extremes(top_k: int, top_p: float, argmax: bool) -> None:
    logits = torch.randn(50, 100)
    out = NATIVE.sample(logits, make_args(50, 1.0, top_k, top_p), "filtered").long()
    assert ((out >= 0) & (out < 100)).all()
    assert torch.equal(out, logits.argmax(-1)) == argmax


def test_case_42_one_hot() -> None:
    logits = torch.full((4, 64), -math.inf)
    logits[:, 37] = 1.0
    for mode in ("greedy", "random", "filtered"):
        assert NATIVE.sample(logits, make_args(4, 1.0, top_k=5, top_p=0.5), mode).tolist() == [37] * 4


def test_case_43_and_46_a_row_does_not_depend_on_other_rows() -> None:
    logits = torch.randn(32, 900)
    args = make_args(
        32,
        temperature=[0.0 if row % 2 else 1.0 for row in range(32)],
        top_k=[row % 7 for row in range(32)],
    )
    for mode in ("random", "filtered"):
        together = NATIVE.sample(logits, args, mode)
        for row in (0, 1, 13, 31):
            one = SampleArgs(*(column[row : row + 1] for column in args))
            assert NATIVE.sample(logits[row : row + 1], one, mode)[0] == together[row]
        assert torch.equal(together[1::2].long(), logits[1::2].argmax(-1))


@pytest.mark.parametrize("mode", ["greedy", "random", "filtered"])
def test_case_45_a_row_with_nan_gives_minus_one(mode: SamplingMode) -> None:
    logits = torch.randn(6, 77)
    logits[0, 0], logits[2, 76], logits[4] = math.nan, math.nan, math.nan
    out = NATIVE.sample(logits, make_args(6, 1.0, top_k=3), mode)
    assert (out[[0, 2, 4]] == -1).all() and (out[[1, 3, 5]] >= 0).all()


@pytest.mark.parametrize("mode", ["greedy", "random", "filtered"])
@pytest.mark.parametrize(("values", "expected"), [([-math.inf] * 9, 0), ([0.0] * 4 + [math.inf] + [1.0] * 5, 4)])
def test_infinite_logits(mode: SamplingMode, values: list[float], expected: int) -> None:
    logits = torch.tensor([values])
    args = make_args(1, 1.0, top_k=3, top_p=0.9)
    assert NATIVE.sample(logits, args, mode).tolist() == [expected]


def test_different_seeds_and_positions_draw_differently() -> None:
    logits = torch.zeros(1, 1000)
    draws = {int(NATIVE.sample(logits, make_args(1, 1.0, seed=seed), "random")) for seed in range(40)}
    assert len(draws) > 35
