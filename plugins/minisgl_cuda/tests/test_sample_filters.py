"""Top-k, top-p and min-p of the Triton sampler: its survivors against float64 and against a search bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="the Triton variant needs triton")
import triton.language as tl  # noqa: E402

from minisgl_core.testing import BackendUnderTest, DeviceFixture, checks_of  # noqa: E402
from minisgl_cpu_sim.fakes import on_cpu  # noqa: E402
from minisgl_cuda.plugin import minisgl_layer_ops  # noqa: E402
from minisgl_cuda.triton_ops import sample as module  # noqa: E402
from support.sampled_rows import DEVICE, EDGE, NEAR, ON_GPU, Found, Row, order_of, randn, run, scores  # noqa: E402

pytestmark = [
    *([pytest.mark.gpu] if ON_GPU else []),
    pytest.mark.usefixtures("few_programs"),
    # From numpy, inside the interpreter.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero|All-NaN slice) encountered"),
]
VOCAB = 151936


def expected(x: np.ndarray, row: Row, slack: float) -> np.ndarray:
    """The survivors (V,) by float64, with ``slack`` more of top-p and a little less of min-p."""
    wide = x.astype(np.float64)
    weight = np.exp((wide - wide.max()) / np.float64(np.float32(row.temperature)))
    order = np.argsort(-wide, kind="stable")
    k = row.top_k if 0 < row.top_k < len(x) else len(x)
    keep = wide >= wide[order[k - 1]]
    if row.top_p < 1:
        held = np.where(keep, weight, 0.0)[order]
        near = np.cumsum(held) - held < (np.float64(np.float32(row.top_p)) + slack) * held.sum()
        near[0] = True
        keep[order[~near]] = False
    if row.min_p > 0:
        least = wide.max() + np.float64(np.float32(row.temperature)) * np.log(np.float64(np.float32(row.min_p)))
        room = slack * max(1.0, abs(least), row.temperature)
        keep &= (wide >= least - room) | ((slack < 0) & (wide == wide.max()))
    kept: np.ndarray = keep
    return kept


def judge(logits: torch.Tensor, rows: list[Row], found: Found) -> None:
    """Survivors, apart from tokens of no probability, and tokens."""
    score = scores(logits, rows)
    for at, (x, row) in enumerate(zip(logits.float().cpu().numpy(), rows, strict=True)):
        real, kept, token = x > -np.inf, found.kept[at], found.tokens[at]
        tight, loose = expected(x, row, -EDGE), expected(x, row, EDGE)
        assert not (tight & real & ~kept).any(), (at, row, np.flatnonzero(tight & real & ~kept)[:5])
        if found.open_p[at]:
            kept &= loose  # of which the token must be one, and better than all that are surely kept
        assert not (kept & real & ~loose).any(), (at, row, np.flatnonzero(kept & real & ~loose)[:5])
        rivals = kept & real & (tight | (not found.open_p[at]))
        assert kept[token] and score[at, token] >= score[at, rivals].max() - NEAR, (at, row, token)


def peaked(vocab: int, seed: int = 0) -> torch.Tensor:
    """One row as models give them: a few tokens hold most of the mass."""
    x = randn(vocab, seed=seed) * 2
    x[torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:12]] += torch.linspace(8, 14, 12)
    return x


ASKED = [
    Row(top_k=20, top_p=0.95), Row(0.6, top_k=20, top_p=0.95, seed=1), Row(top_k=50), Row(top_p=0.9), Row(min_p=0.05),
    Row(1.3, top_p=0.8, min_p=0.02), Row(0.7, top_k=300, min_p=0.01), Row(top_k=1), Row(top_p=1e-9), Row(top_p=0.0),
    Row(min_p=1.0), Row(2.0, top_k=40, top_p=0.5, min_p=0.1), Row(1e-5, top_k=40), Row(1e-38, top_p=0.99),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "vocab"), [(torch.float32, 9001), (torch.bfloat16, VOCAB), (torch.float16, 20_000)], ids=str
)
def test_peaked_rows_are_decided_among_the_gathered_tokens(dtype: torch.dtype, vocab: int) -> None:
    rows = ASKED if ON_GPU or vocab < VOCAB else ASKED[:5]
    logits = torch.stack([peaked(vocab, seed) for seed in range(len(rows))]).to(dtype)
    found = run(logits, rows)
    judge(logits, rows, found)
    assert found.decided == [row.top_p == 1 or row.top_k > 0 for row in rows]
    assert found.open_p == [not decided for decided in found.decided]


FLAT = [
    Row(top_p=0.95), Row(top_k=20, top_p=0.95), Row(top_k=2000), Row(top_k=2000, top_p=0.3), Row(top_k=500, top_p=0.5),
    Row(top_p=0.999, min_p=0.5), Row(min_p=1e-4), Row(top_k=9000, top_p=0.7, min_p=0.001), Row(top_p=1 - 2**-24),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_flat_rows_are_searched_where_the_gathered_tokens_do_not_do(dtype: torch.dtype) -> None:
    logits = randn(len(FLAT), 12_000).to(dtype)
    found = run(logits, FLAT)
    judge(logits, FLAT, found)
    assert found.decided == [False, True, False, False, True, False, False, False, False]
    assert found.open_p == [True, False, False, True, False, True, False, True, True]


TIED = [Row(top_k=20, top_p=0.95), Row(top_k=20), Row(top_p=0.3), Row(0.5, top_p=0.95), Row(min_p=1.0)]
TIED_ROWS = {
    "equal": lambda v: torch.zeros(v),
    "negative equal": lambda v: torch.full((v,), -3.0),
    "two values": lambda v: (torch.arange(v) % 3 == 1).float() * 2 - 5,
    "few values": lambda v: (torch.arange(v) * 7919 % 23).float() / 8 - 1,
    "one huge": lambda v: torch.zeros(v).index_fill(0, torch.tensor([v // 2]), 60_000.0),
    "both zeros": lambda v: torch.where(torch.arange(v) % 2 == 0, 0.0, -0.0),
    "denormals": lambda v: (torch.arange(v) % 5 - 2).float() * 1e-40,
    "masked but few": lambda v: torch.full((v,), -torch.inf).index_fill(0, torch.tensor([3, v // 2, v - 1]), 1.5),
    "masked but one": lambda v: torch.full((v,), -torch.inf).index_fill(0, torch.tensor([v - 2]), -1.5),
}


@pytest.mark.parametrize("name", TIED_ROWS)
@pytest.mark.parametrize("vocab", [40, 5001])
def test_equals_survive_top_k_together_and_top_p_by_id(name: str, vocab: int) -> None:
    logits = TIED_ROWS[name](vocab).expand(len(TIED), -1).contiguous()
    found = run(logits, TIED)
    judge(logits, TIED, found)
    if name.startswith("masked") or vocab <= module.ROOM:
        assert found.open_p == [not decided for decided in found.decided] == [row in TIED[2:4] for row in TIED]


def test_more_equals_than_can_be_gathered() -> None:
    rows = [Row(top_k=20, seed=seed) for seed in range(6)]
    logits = torch.ones(len(rows), module.ROOM + 900, dtype=torch.bfloat16)
    found = run(logits, rows)
    judge(logits, rows, found)
    assert not any(found.decided) and max(found.tokens) >= module.ROOM


def test_few_values_in_a_wide_row() -> None:
    logits = TIED_ROWS["few values"](VOCAB)[None].bfloat16()
    rows = [Row(top_k=20, top_p=0.5)]
    found = run(logits, rows)
    judge(logits, rows, found)
    assert found.decided == [False]


def test_rows_without_a_distribution_give_their_maximum_or_minus_one() -> None:
    logits = randn(5, 5000)
    logits[0] = -torch.inf
    logits[1, [4100, 4400]] = torch.inf
    logits[2, 4900] = torch.nan
    logits[3, :4096:2] = torch.nan
    logits[4, 17] = torch.nan
    rows = [Row(top_k=5), Row(top_p=0.5), Row(top_k=5, top_p=0.5), Row(min_p=0.1), Row(0.0, top_k=3)]
    assert run(logits, rows).tokens == [0, 4100, -1, -1, -1]
    assert run(logits, [Row()] * 5).tokens == [0, 4100, -1, -1, -1]


def test_rows_with_and_without_filters_in_one_batch() -> None:
    logits = torch.stack([peaked(6000, seed) for seed in range(4)])
    rows = [Row(), Row(top_k=9), Row(0.0, top_k=9), Row(top_k=2**30)]
    found = run(logits, rows)
    assert found.decided == [False, True, False, False]
    assert found.tokens[2] == int(logits[2].argmax())
    judge(logits[[0, 1]], rows[:2], replace(found, tokens=found.tokens[:2]))
    assert found.kept[0].all() and found.kept[3].all()


def test_neither_other_rows_nor_the_number_of_programs_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(top_k=20, top_p=0.95), Row(top_p=0.9, seed=2), Row(1.4, top_p=0.97), Row(top_k=300, top_p=0.99)]
    vocab = VOCAB if ON_GPU else 18_000
    logits = torch.stack([*(peaked(vocab, seed) for seed in range(2)), *randn(2, vocab)]).bfloat16()
    whole = run(logits, rows)
    for programs in (1, 9, 10**6):
        monkeypatch.setattr(module, "GATHERERS", programs)
        again = run(logits, rows)
        assert again.tokens == whole.tokens and again.decided == whole.decided
        assert all(np.array_equal(a, b) for a, b in zip(again.kept, whole.kept, strict=True))
    alone = run(logits[:1], rows[:1])
    assert alone.tokens[0] == whole.tokens[0] and np.array_equal(alone.kept[0], whole.kept[0])


LOGITS = st.one_of(
    st.tuples(st.just("normal"), st.sampled_from([1e-40, 1e-3, 0.3, 1.0, 4.0, 30.0])),
    st.tuples(st.just("values"), st.integers(1, 40)),
    st.tuples(st.just("masked"), st.integers(1, 3000)),
    st.tuples(st.just("steep"), st.floats(0.01, 20.0)),
)
ROWS = st.builds(
    Row,
    temperature=st.sampled_from([1e-3, 0.3, 1.0, 3.0, 50.0]),
    top_k=st.one_of(st.just(0), st.integers(1, 5200)),
    top_p=st.one_of(st.just(1.0), st.floats(0.0, 1.0, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(2**-20, 1.0, width=32)),
    seed=st.integers(0, 1000),
)


def drawn(kind: str, number: float, vocab: int, seed: int) -> torch.Tensor:
    if kind == "values":
        return torch.randint(0, int(number), (vocab,), generator=torch.Generator().manual_seed(seed)) / 4
    if kind == "steep":
        return -torch.log1p(torch.arange(vocab).float())[randn(vocab, seed=seed).argsort()] * number
    x = randn(vocab, seed=seed)
    if kind == "masked":
        return torch.where(torch.arange(vocab) * 7919 % vocab < number, x, -torch.inf)
    return x * number


@settings(max_examples=40, deadline=None)
@given(logits=LOGITS, row=ROWS, vocab=st.sampled_from([1, 37, 2048, 2049, 5000]), bits=st.sampled_from([16, 32]))
def test_survivors_are_those_of_float64(logits: tuple[str, float], row: Row, vocab: int, bits: int) -> None:
    x = drawn(*logits, vocab, row.seed)[None].to(torch.bfloat16 if bits == 16 else torch.float32)
    judge(x, [row], run(x, [row]))


def test_filtered_tokens_are_drawn_by_their_probabilities() -> None:
    """Chi-squared with 3 degrees of freedom exceeds 16.3 once in 1,000 times; the seeds are fixed."""
    draws = 4000 if ON_GPU else 100
    x = torch.full((3000,), -4.0, dtype=torch.bfloat16)
    near = torch.tensor([5, 900, 2100, 2999])
    x[near] = torch.tensor([2.0, 1.0, 0.5, 1.5], dtype=x.dtype)
    found = run(x.expand(draws, -1).contiguous(), [Row(0.7, top_k=4, seed=seed) for seed in range(draws)])
    counts = np.array([found.tokens.count(int(token)) for token in near])
    want = torch.softmax(x[near].float() / 0.7, dim=0).numpy() * draws
    assert counts.sum() == draws and ((counts - want) ** 2 / want).sum() < 16.3, counts


# The search that the gathered tokens replaced: one bit of the order per pass over the whole row, sums in float32.


# Triton's compiler knows no annotations but its own.
@triton.jit
def _order(x):
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _bit_by_bit(logits_ptr, limit_ptr, top, temperature, k, p, vocab, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + lane, mask=lane < vocab, other=float("-inf")).to(tl.float32)
    order = _order(x).to(tl.int64) + 2147483648
    share = tl.exp((x - top) / temperature)
    floor = tl.full([], 0, tl.int64)
    last = tl.full([], 2147483647, tl.int32)
    if (k > 0) & (k < vocab):
        for bit in range(32):
            candidate = floor + (tl.full([], 1, tl.int64) << (31 - bit))
            count = tl.sum(((order >= candidate) & (lane < vocab)).to(tl.int32), axis=0)
            floor = tl.where(count >= k, candidate, floor)
    if p < 1.0:
        budget = tl.sum(tl.where(order >= floor, share, 0.0), axis=0) * p
        found = tl.full([], 0, tl.int64)
        for bit in range(32):
            candidate = found + (tl.full([], 1, tl.int64) << (31 - bit))
            found = tl.where(tl.sum(tl.where(order >= candidate, share, 0.0), axis=0) >= budget, candidate, found)
        floor = tl.maximum(floor, found)
        left = budget - tl.sum(tl.where(order > floor, share, 0.0), axis=0)
        equal = (order == floor) & (lane < vocab)
        mine = tl.where(equal, share, 0.0)
        last = tl.max(tl.where(equal & (tl.cumsum(mine, axis=0) - mine < left), lane, -1), axis=0)
    tl.store(limit_ptr, floor - 2147483648)
    tl.store(limit_ptr + 1, last.to(tl.int64))


@pytest.mark.parametrize("vocab", [300, 8000])
@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_survivors_are_those_of_a_search_bit_by_bit(vocab: int, scale: float) -> None:
    rows = [Row(top_k=20, top_p=0.95), Row(top_k=50), Row(0.8, top_p=0.9), Row(top_k=200, top_p=0.61), Row(top_p=0.2)]
    logits = (randn(len(rows), vocab, seed=vocab) * scale).bfloat16()  # with many equals
    found = run(logits, rows)
    score = scores(logits, rows)
    for at, (x, row, kept) in enumerate(zip(logits, rows, found.kept, strict=True)):
        limit = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        _bit_by_bit[(1,)](
            x.to(DEVICE), limit, float(x.max()), row.temperature, row.top_k, row.top_p, vocab,
            BLOCK=triton.next_power_of_2(vocab),
        )  # fmt: skip
        order, ids = order_of(x.float().numpy()), np.arange(vocab)
        floor, last = limit.tolist()
        wanted = (order > floor) | ((order == floor) & (ids <= last))
        if found.open_p[at]:
            assert score[at, found.tokens[at]] >= score[at, wanted].max() - NEAR, row
        else:
            assert np.array_equal(kept, wanted), row


KIT_CASES = ("float32/filtered", "float32/filtered/flat", "float32/filtered/rewritten", "bfloat16/filtered")


@pytest.mark.skipif(ON_GPU, reason="there the kit is run whole, for the backend as it is")
@pytest.mark.parametrize("name", KIT_CASES)
def test_filters_pass_the_conformance_kit(name: str) -> None:
    """The other checks of the operation take minutes interpreted."""
    spec = on_cpu(next(s for s in minisgl_layer_ops() if "sample" in s.caps[0].ops))
    caps = replace(spec.caps[0], ops=("sample",), dtypes=(name.split("/", maxsplit=1)[0],))
    fixture, under_test = DeviceFixture("cpu"), BackendUnderTest(replace(spec, caps=(caps,)))
    checks = {check.name: check for check in checks_of(under_test, fixture, quick=True)}
    checks[f"sample/{name}"].conform(under_test, fixture)
