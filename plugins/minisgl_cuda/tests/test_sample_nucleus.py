"""Top-p without top-k: tokens by repeated draws against the nucleus in float64, and the bound on the noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="the Triton variant needs triton")
import triton.language as tl  # noqa: E402

from minisgl_cuda.triton_ops import sample as module  # noqa: E402
from minisgl_cuda.triton_ops.noise import gumbel as noise  # noqa: E402
from minisgl_cuda.triton_ops.noise import gumbel_bound  # noqa: E402
from support.sampled_rows import DEVICE, EDGE, NEAR, ON_GPU, Row, randn, run, scores  # noqa: E402

pytestmark = [
    *([pytest.mark.gpu] if ON_GPU else []),
    pytest.mark.usefixtures("few_programs"),
    # From numpy, inside the interpreter.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered"),
]


def kept(x: np.ndarray, row: Row, slack: float) -> np.ndarray:
    """The survivors (V,) in float64, with ``slack`` more of top-p."""
    weight = np.exp((x - x.max()) / row.temperature)
    order = np.argsort(-x, kind="stable")
    k = row.top_k if 0 < row.top_k < len(x) else len(x)
    weight = np.where(x >= x[order[k - 1]], weight, 0.0)
    held = weight[order]
    inside = np.zeros(len(x), dtype=bool)
    inside[order] = np.cumsum(held) - held < (np.float64(np.float32(row.top_p)) + slack) * held.sum()
    inside[order[0]] = True
    return inside & (weight > 0) & (weight >= row.min_p)


def judge(logits: torch.Tensor, rows: list[Row], tokens: list[int]) -> None:
    """Each token survives and beats all that surely do."""
    for x, row, token, score in zip(logits.double().numpy(), rows, tokens, scores(logits, rows), strict=True):
        assert kept(x, row, EDGE)[token], (row, token)
        assert score[token] >= score[kept(x, row, -EDGE)].max() - NEAR, (row, token)


def firsts_survive(logits: torch.Tensor, rows: list[Row]) -> list[bool]:
    """Whether the best token of all is a survivor, so that one draw suffices."""
    best = scores(logits, rows).argmax(1)
    return [bool(kept(x, row, 0.0)[at]) for x, row, at in zip(logits.double().numpy(), rows, best, strict=True)]


SHARES = (0.95, 0.5, 0.9, 0.05, 0.999, 1e-9, 0.3, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [37, 4096, 9001])
def test_tokens_are_the_best_of_the_nucleus(dtype: torch.dtype, vocab: int) -> None:
    rows = [Row((1.0, 0.6, 2.5)[i % 3], top_p=SHARES[i % 8], seed=i) for i in range(16)]
    logits = (randn(16, vocab, seed=vocab) * torch.tensor([0.1, 1.0, 3.0, 20.0]).repeat(4)[:, None]).to(dtype)
    judge(logits, rows, run(logits, rows).tokens)


def test_rows_whose_first_tokens_do_not_survive_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(top_p=SHARES[i % 7], seed=100 + i) for i in range(14)]
    logits = randn(14, 5000, seed=3)
    first = firsts_survive(logits, rows)
    assert 3 < sum(first) < 11
    tokens = {}
    for draws in (1, 2, 12):
        monkeypatch.setattr(module, "_draws", lambda rows, mode, draws=draws: draws)
        found = run(logits, rows)
        tokens[draws] = found.tokens
        if draws == 1:
            assert found.alone == [not survives for survives in first]
        if draws == 2:
            assert 0 < sum(found.alone) < 14 - sum(first)
        if draws == 12:
            assert not any(found.alone)
    assert tokens[1] == tokens[2] == tokens[12]
    judge(logits, rows, tokens[1])


def test_many_rows_get_a_third_draw_and_few_a_second() -> None:
    modes = (module.GREEDY, module.RANDOM, module.FILTERED)
    assert [module._draws(rows, mode) for rows in (1, module.MANY) for mode in modes] == [0, 1, 2, 0, 1, 3]


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.3, 0.75, 0.9999])
def test_of_equal_logits_the_lowest_ids_are_the_nucleus(share: float) -> None:
    vocab = 6000
    rows = [Row(top_p=share, seed=seed) for seed in range(6)]
    logits = torch.full((6, vocab), -2.5)
    number = max(1, int(np.ceil(vocab * np.float64(np.float32(share)))))
    best = scores(logits, rows)[:, :number].argmax(1)
    assert run(logits, rows).tokens == best.tolist()


def test_a_token_after_exactly_the_share_is_out() -> None:
    rows = [Row(top_p=(0.25, 0.5, 0.75)[seed % 3], seed=seed) for seed in range(30)]
    logits = torch.zeros(30, 4)
    best = [int(score[: int(row.top_p * 4)].argmax()) for row, score in zip(rows, scores(logits, rows), strict=True)]
    assert run(logits, rows).tokens == best


def test_the_best_score_wins_where_another_has_the_best_bound() -> None:
    """A bound by the bits of u, as float32, where the noise is -log(-log(1 - u))."""
    rows = [Row(seed=seed) for seed in range(3000)]
    logits = randn(1, 1000).expand(3000, -1)
    score = scores(logits, rows)
    plain = logits.double().numpy() - float(logits.max())
    u = -np.expm1(-np.exp(plain - score)).astype(np.float32)
    bound = plain - np.log(2) * (u.view(np.int32) / 2**23 - 127)
    gap = np.diff(np.sort(score, 1)[:, -2:])[:, 0]
    odd = np.flatnonzero((score.argmax(1) != bound.argmax(1)) & (gap > NEAR))
    assert len(odd) > 5
    found = run(logits[odd].contiguous(), [rows[at] for at in odd])
    assert found.tokens == score[odd].argmax(1).tolist()


def test_masked_tokens_are_never_drawn() -> None:
    allowed = torch.tensor([3, 5000, 8191, 8192, 8999])
    logits = torch.full((12, 9001), -torch.inf)
    logits[:, allowed] = randn(12, 5)
    rows = [Row(top_p=0.7, seed=seed) for seed in range(12)]
    found = run(logits, rows)
    judge(logits, rows, found.tokens)
    assert set(found.tokens) <= set(allowed.tolist()) and len(set(found.tokens)) > 2


def test_top_p_takes_its_share_of_all_tokens_before_min_p() -> None:
    """Two tokens of 40 and 30 per cent; 45 per cent of all tokens reaches the second, 45 of those two does not."""
    probs = torch.full((40, 5000), 0.3 / 4998)
    probs[:, 4321], probs[:, 17] = 0.4, 0.3
    rows = [Row(top_p=0.45, min_p=0.01, seed=seed) for seed in range(40)]
    found = run(probs.log(), rows)
    judge(probs.log(), rows, found.tokens)
    assert set(found.tokens) == {17, 4321}


def test_top_p_takes_its_share_of_what_a_wide_top_k_keeps() -> None:
    logits = randn(6, 9001, seed=5)
    rows = [Row(top_p=0.4, top_k=5000, min_p=(0.0, 0.02)[i % 2], seed=i) for i in range(6)]
    judge(logits, rows, run(logits, rows).tokens)
    narrow = torch.where(torch.arange(9001) < 3000, 0.0, torch.where(torch.arange(9001) < 6000, -1.0, -1.5))
    rows = [Row(top_p=0.7, top_k=3001, seed=seed) for seed in range(6)]
    judge(narrow.expand(6, -1), rows, run(narrow.expand(6, -1).contiguous(), rows).tokens)


def test_far_slices_neither_win_nor_weigh_but_others_do() -> None:
    logits = randn(12, 9001)
    logits[:, :4096] -= 40
    logits[4:8, 8192:] += 30
    logits[8:, 8500] = 7.0  # against thousands in the slice before it
    rows = [Row((0.5, 1.0)[i % 2], top_p=0.9, seed=i) for i in range(12)]
    found = run(logits, rows)
    judge(logits, rows, found.tokens)
    assert any(4096 <= token < 8192 for token in found.tokens[8:])


def test_neither_other_rows_nor_the_number_of_programs_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Row(top_p=0.9, seed=1), Row(top_p=0.5, seed=2), Row(top_p=0.05, seed=3), Row(top_k=9, seed=4),
        Row(top_k=9000, top_p=0.3), Row(seed=5), Row(0.0, top_p=0.8), Row(top_p=0.2, min_p=0.3, seed=6),
    ]  # fmt: skip
    logits = randn(len(rows), 9001, seed=9).bfloat16()
    whole = run(logits, rows)
    for programs in (7, 10**6):
        monkeypatch.setattr(module, "WEIGHERS", programs)
        again = run(logits, rows)
        assert (again.tokens, again.alone) == (whole.tokens, whole.alone)
    for at in (0, 2, 4):
        assert run(logits[at : at + 1], rows[at : at + 1]).tokens == [whole.tokens[at]]
    turned = run(logits.flip(0), rows[::-1])
    assert turned.tokens == whole.tokens[::-1]


@settings(max_examples=30, deadline=None)
@given(
    scale=st.sampled_from([1e-40, 0.01, 1.0, 5.0, 50.0]),
    values=st.sampled_from([0, 2, 9]),
    vocab=st.sampled_from([1, 40, 4097, 6000]),
    share=st.floats(0.0, 1.0, width=32, exclude_max=True),
    temperature=st.sampled_from([1e-3, 0.5, 1.0, 30.0]),
    seed=st.integers(0, 10_000),
)
def test_tokens_are_those_of_float64(
    scale: float, values: int, vocab: int, share: float, temperature: float, seed: int
) -> None:
    x = randn(1, vocab, seed=seed)
    x = ((x * values).round() / max(values, 1) if values else x) * scale
    rows = [Row(temperature, top_p=share, seed=seed)]
    judge(x, rows, run(x, rows).tokens)


@triton.jit
def _both(key, token_ptr, noise_ptr, bound_ptr, number, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + at, mask=at < number, other=0)
    word = tl.full([], key, tl.int32).to(tl.uint32, bitcast=True)
    tl.store(noise_ptr + at, noise(word, token), mask=at < number)
    tl.store(bound_ptr + at, gumbel_bound(word, token), mask=at < number)


def _unmix(h: np.ndarray) -> np.ndarray:
    """The inverse of the hash's finaliser."""
    for multiplier, shifts in ((0xC2B2AE35, (16,)), (0x85EBCA6B, (13, 26)), (1, (16,))):
        mixed = h.copy()
        for shift in shifts:
            mixed = mixed ^ (h >> np.uint32(shift))
        h = mixed * np.uint32(pow(multiplier, -1, 2**32))
    return h


def test_the_bound_on_the_noise_is_above_it_and_near_where_it_is_large() -> None:
    key, generator = 123456789, np.random.default_rng(0)
    ends = np.concatenate([np.arange(2000), 2**32 - 1 - np.arange(2000), 2 ** np.arange(32)]).astype(np.uint32)
    hashes = np.concatenate([ends, generator.integers(0, 2**32, 20_000).astype(np.uint32)])
    words = _unmix(_unmix(hashes) - np.uint32(key)) ^ np.uint32(key)
    tokens = torch.from_numpy((words * np.uint32(pow(0x9E3779B1, -1, 2**32))).view(np.int32)).to(DEVICE)
    value, bound = torch.empty(2, len(tokens), device=DEVICE).unbind()
    _both[(triton.cdiv(len(tokens), 4096),)](key, tokens, value, bound, len(tokens), BLOCK=4096)
    u = (hashes.astype(np.float64) + 0.5) * 2.0**-32
    real = torch.from_numpy(-np.log(-np.log1p(-np.minimum(u, 1 - 2.0**-24))))
    value, bound = value.cpu().double(), bound.cpu().double()
    decides = real > 0  # far below, 1 - u has few bits in float32
    torch.testing.assert_close(value[decides], real[decides], rtol=0, atol=2e-5)
    assert value.max() < 22.9 and value.min() > -2.82
    assert (bound - value).min() > 5e-4 and (bound - value)[real > 4].max() < 0.07
