"""The composed layer operations against float64 formulas written out here, and the sampling cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from minisgl_core.builtin.ops import ComposedOps, apply_rope, filter_mask, gumbel_noise
from minisgl_core.plugin_api import OpsSetup, RopeStoreArgs, SampleArgs


class OneRank:
    """In place of the communicator of a single rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


class SpyKV:
    """Remembers what was stored."""

    def store(self, k_cache, v_cache, k, v, out_loc):
        self.k, self.v, self.out_loc = k.clone(), v.clone(), out_loc.clone()


@pytest.fixture
def ops() -> ComposedOps:
    setup = OpsSetup(torch.device("cpu"), torch.float32, 4, 2, 8, 16, 32, 64, 8, SpyKV(), OneRank())
    return ComposedOps(setup)


def args(rows: int, *, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=5) -> SampleArgs:
    def full(value, dtype):
        values = value if isinstance(value, list) else [value] * rows
        return torch.tensor(values, dtype=dtype)

    return SampleArgs(
        full(temperature, torch.float32),
        full(top_k, torch.int32),
        full(top_p, torch.float32),
        full(min_p, torch.float32),
        full(seed, torch.int32),
        full(0, torch.int32),
        full(position, torch.int32),
    )


def test_rms_norm_and_residual_follow_the_formula(ops):
    x, r, w = torch.randn(5, 16), torch.randn(5, 16), torch.rand(16) + 0.5
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()
    torch.testing.assert_close(ops.rms_norm(x, w, 1e-6).double(), expected, atol=1e-6, rtol=1e-6)
    normed, residual = ops.add_rms_norm(x.clone(), r.clone(), w, 1e-6)
    torch.testing.assert_close(residual, x + r)
    torch.testing.assert_close(normed, ops.rms_norm(x + r, w, 1e-6))


def test_rope_rotates_pairs_half_a_head_apart_and_leaves_the_rest():
    x = torch.zeros(1, 1, 6)
    x[0, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    angle = torch.tensor([[math.pi / 2, math.pi]])
    out = apply_rope(x, angle.cos(), angle.sin())
    # pair (1, 3) turns by 90 degrees, pair (2, 4) by 180; 5 and 6 lie past the rotary width
    torch.testing.assert_close(out[0, 0], torch.tensor([-3.0, -2.0, 1.0, -4.0, 5.0, 6.0]), atol=1e-6, rtol=0)


def test_qk_norm_rope_store_stores_rotated_keys_and_plain_values(ops):
    qkv = torch.randn(3, 8 * 8)
    table = torch.cat((torch.ones(10, 4), torch.zeros(10, 4)), dim=-1)  # no rotation
    weight = torch.full((8,), 2.0)
    positions, out_loc = torch.arange(3, dtype=torch.int32), torch.tensor([4, 5, 6], dtype=torch.int32)
    q, k, v = ops.qk_norm_rope_store(
        qkv.clone(), RopeStoreArgs(weight, weight, 1e-6, table, None, None), positions, out_loc
    )
    heads = qkv.view(3, 8, 8)
    torch.testing.assert_close(q, ops.rms_norm(heads[:, :4], weight, 1e-6))
    torch.testing.assert_close(k, ops.rms_norm(heads[:, 4:6], weight, 1e-6))
    torch.testing.assert_close(v, heads[:, 6:])
    assert torch.equal(ops._s.kv.k, k) and torch.equal(ops._s.kv.v, v) and torch.equal(ops._s.kv.out_loc, out_loc)


@pytest.mark.parametrize(
    ("top_k", "renormalize", "expected"),
    [(2, False, [0.563021, 0.207124]), (2, True, [0.731059, 0.268941]), (1, True, [1.0])],
)
def test_case_71_norm_topk_prob(ops, top_k, renormalize, expected):
    ids, weights = ops.route(torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0]]), top_k, renormalize)
    assert ids.tolist() == [[0, 1][:top_k]] and ids.dtype == torch.int32
    torch.testing.assert_close(weights, torch.tensor([expected]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("temperature", [1e-5, 1e-8, 1e-38])
def test_case_38_tiny_temperatures_take_the_maximum(ops, temperature):
    logits = torch.tensor([[2.875, 2.955, 11.0625]], dtype=torch.bfloat16)
    for seed in range(20):
        assert ops.sample(logits, args(1, temperature=temperature, seed=seed), "random").tolist() == [2]


def test_case_42_extreme_filters_stay_in_range(ops):
    logits = torch.randn(4, 50)
    best = logits.argmax(-1).tolist()
    wide = ops.sample(logits, args(4, temperature=1.0, top_k=[2**30, 50, 0, 1]), "filtered").tolist()
    assert all(0 <= t < 50 for t in wide) and wide[3] == best[3]
    for top_p in (0.0, 1e-9):
        assert ops.sample(logits, args(4, temperature=1.0, top_p=top_p), "filtered").tolist() == best
    one_hot = torch.full((1, 50), -torch.inf)
    one_hot[0, 17] = 0.0
    assert ops.sample(one_hot, args(1, temperature=1.0, top_p=0.5), "filtered").tolist() == [17]


def test_case_43_noise_depends_on_seed_position_and_token_only(ops):
    logits = torch.zeros(1, 200)
    alone = ops.sample(logits, args(1, temperature=1.0, seed=42), "random").item()
    several = args(4, temperature=[0.0, 1.0, 1.0, 0.5], seed=[1, 42, 7, 42])
    together = ops.sample(logits.expand(4, -1), several, "random").tolist()
    assert together[1] == alone and together[0] == 0
    drawn = {ops.sample(logits, args(1, temperature=1.0, seed=s), "random").item() for s in range(50)}
    moved = {ops.sample(logits, args(1, temperature=1.0, seed=42, position=p), "random").item() for p in range(50)}
    assert len(drawn) > 20 and len(moved) > 20


def test_case_45_a_row_of_nan_says_so_and_spares_the_other_rows(ops):
    logits = torch.randn(3, 20)
    clean = ops.sample(logits, args(3), "greedy").tolist()
    logits[1, 3] = torch.nan
    for mode in ("greedy", "random", "filtered"):
        dirty = ops.sample(logits, args(3), mode).tolist()
        assert dirty == [clean[0], -1, clean[2]]


def test_greedy_takes_the_lowest_id_of_a_tie_whatever_the_other_rows_do(ops):
    logits = torch.zeros(2, 30)
    logits[0, [7, 3, 21]] = 4.0
    for mode in ("greedy", "random", "filtered"):
        assert ops.sample(logits, args(2, temperature=[0.0, 1.0]), mode)[0].item() == 3


def test_sampled_frequencies_follow_the_softmax(ops):
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]]).expand(4000, -1)
    drawn = ops.sample(logits, args(4000, temperature=0.7, seed=list(range(4000))), "random")
    counts = np.bincount(drawn.numpy(), minlength=4)
    expected = torch.softmax(logits[0].double() / 0.7, -1).numpy() * 4000
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < 16.27  # 0.1 % point of chi-squared with 3 degrees of freedom


def test_noise_matches_a_scalar_computation():
    def fmix(h):
        h ^= h >> 16
        h = h * 0x85EBCA6B % 2**32
        h ^= h >> 13
        h = h * 0xC2B2AE35 % 2**32
        return h ^ (h >> 16)

    def scalar(seed_lo, seed_hi, position, token):
        key = fmix(seed_lo ^ fmix((seed_hi + 0x9E3779B9) % 2**32))
        key = fmix(key ^ fmix((position + 0x7F4A7C15) % 2**32))
        h = fmix((fmix(token * 0x9E3779B1 % 2**32 ^ key) + key) % 2**32)
        return -math.log(-math.log1p(-(h + 0.5) / 2**32))

    low, high = torch.tensor([7, -5], dtype=torch.int32), torch.tensor([0, 9], dtype=torch.int32)
    noise = gumbel_noise(low, high, torch.tensor([3, 1000], dtype=torch.int32), 40)
    expected = [[scalar(lo % 2**32, hi, at, t) for t in range(40)] for lo, hi, at in ((7, 0, 3), (-5, 9, 1000))]
    np.testing.assert_allclose(noise.numpy(), expected, rtol=2e-5, atol=2e-6)


def test_filter_mask_by_hand():
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 4)
    keep = filter_mask(
        probs,
        torch.tensor([2, 0, 0, 3]),
        torch.tensor([1.0, 0.65, 1.0, 0.7]),
        torch.tensor([0.0, 0.0, 0.5, 0.0]),
    )
    assert keep.tolist() == [
        [True, True, False, False],  # top-k 2
        [True, True, False, False],  # 0.4, 0.7 >= 0.65: stop
        [True, True, True, False],  # at least half of 0.4
        [True, True, False, False],  # of 0.9 kept by top-k 3, 0.7 is 0.63: 0.4 and 0.3 reach it
    ]
