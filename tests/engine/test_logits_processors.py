"""Logits processors and log-probabilities of a whole batch, compared with those of one row after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.builtin.platform import CpuPlatform
from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.engine import logits_processors
from minisgl_core.engine.logits_processors import LogitsProcessor, RowProcessor, row_parts
from minisgl_core.engine.masks import TokenMasks
from minisgl_core.engine.sampler import Sampler, pack_params
from minisgl_core.engine.state import DecodeState
from support.constrained import EVEN, packed

VOCAB, WIDTH, ROWS = 40, 64, 8


def process_one(row: torch.Tensor, req: Req) -> None:
    """The definition: a request's penalties and biases, on its logits (V,) in place."""
    p = req.sampling_params
    if p.repetition_penalty != 1.0:
        seen = torch.from_numpy(req.tokens.astype("int64")).unique()
        values = row[seen]
        row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        ids, counts = torch.from_numpy(req.tokens[req.prompt_len :].astype("int64")).unique(return_counts=True)
        row[ids] -= p.presence_penalty + p.frequency_penalty * counts.float()
    sums: dict[int, float] = {}
    for token, value in cast("Sequence[tuple[int, float]]", p.logit_bias):
        sums[token] = sums.get(token, 0.0) + value
    for token, value in sums.items():
        if token < row.numel():
            row[token] += value
    if req.grammar is not None and req.grammar.allowed is not None:
        denied = torch.ones(row.numel(), dtype=torch.bool)
        denied[list(req.grammar.allowed)] = False
        row[denied] = -torch.inf


def logprobs_one(row: torch.Tensor, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    table = torch.log_softmax(row.float(), dim=-1)
    values, ids = table.topk(count)
    return float(table[max(token, 0)]), list(zip(ids.tolist(), values.tolist(), strict=True))


class Allowed:
    """The state of a constrained answer, of which one mask is known; None = every token is allowed."""

    def __init__(self, allowed: frozenset[int] | None) -> None:
        self.allowed = allowed

    def fill_mask(self, row: np.ndarray) -> bool:
        if self.allowed is not None:
            row[:] = packed(self.allowed, VOCAB)
        return self.allowed is not None


def masks_of(vocab_size: int) -> TokenMasks:
    return TokenMasks(vocab_size, torch.device("cpu"))


class SamplerFixture:
    """A sampler whose parts have ``max_rows`` rows and ``room`` numbers."""

    def __init__(self, max_rows: int = ROWS, room: int = 10_000, rows: int = ROWS, vocab_size: int = VOCAB) -> None:
        platform = CpuPlatform()
        self.processor = LogitsProcessor(platform, vocab_size, rows, WIDTH, masks_of(vocab_size))
        self.processor.max_rows, self.processor._room = max_rows, room
        state = DecodeState(platform, rows, WIDTH, 1, 0, 64, pack_params(SamplingParams(), 0))
        self.sampler = Sampler(cast("Any", None), state, self.processor, seed=0)

    def processed(self, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, list[list[int]]]:
        """All of the logits, float32, the processed rows in their places; and which rows each part had."""
        self.sampler.prepare(batch)
        whole, parts = logits.float().clone(), []
        for places, part in self.sampler.processed(logits, batch):
            assert part.dtype == torch.float32
            whole[places.long()] = part
            parts.append(places.tolist())
        return whole, parts


def batch_of(reqs: list[Req]) -> Batch:
    return Batch(reqs=reqs, phase="decode", padded_size=len(reqs))


def req_of(row: int, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Req:
    tokens = torch.tensor([*prompt, *output], dtype=torch.int32)
    req = Req(tokens, row, 0, 10, row, params)
    req.prompt_len = len(prompt)
    return req


tokens = st.integers(0, VOCAB - 1)
penalty = st.one_of(st.just(0.0), st.floats(-3, 3, width=32))


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        repetition_penalty=draw(st.one_of(st.just(1.0), st.floats(0.5, 3))),
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        logit_bias=draw(st.lists(st.tuples(st.integers(0, VOCAB + 3), st.floats(-9, 9)), max_size=4)),
        logprobs=draw(st.one_of(st.none(), st.integers(0, 5))),
        grammar=draw(st.sampled_from([None, None, EVEN])),
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    some = st.lists(tokens, max_size=20)
    reqs = [
        req_of(row, draw(st.lists(tokens, min_size=1, max_size=20)), draw(some), draw(params()))
        for row in draw(st.permutations(range(ROWS)))[: draw(st.integers(1, ROWS))]
    ]
    for req in reqs:
        if req.sampling_params.grammar is not None:
            req.grammar = Allowed(draw(st.one_of(st.none(), st.frozensets(tokens, min_size=1, max_size=5))))
    return batch_of(reqs)


@settings(max_examples=200, deadline=None)
@given(
    batch=batches(),
    max_rows=st.integers(1, ROWS),
    room=st.sampled_from([1, 30, 1000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_a_batch_is_processed_as_each_of_its_rows(
    batch: Batch, max_rows: int, room: int, dtype: torch.dtype, seed: int
) -> None:
    logits = torch.randn(batch.size, VOCAB, generator=torch.Generator().manual_seed(seed)).mul(4).to(dtype)
    logits[0, 3] = -torch.inf
    before = logits.clone()
    found, parts = SamplerFixture(max_rows, room).processed(logits, batch)
    expected = logits.float().clone()
    for row, req in enumerate(batch.reqs):
        process_one(expected[row], req)
    assert torch.equal(found, expected)
    assert torch.equal(logits, before)
    rows = [row for row, req in enumerate(batch.reqs) if req.sampling_params.changes_logits]
    rows.sort(key=lambda row: batch.reqs[row].sampling_params.grammar is None)
    assert [row for part in parts for row in part] == rows, "each row with a processor, once"
    assert all(len(part) <= max_rows for part in parts)


@settings(max_examples=100, deadline=None)
@given(batch=batches(), max_rows=st.integers(1, ROWS), seed=st.integers(0, 99))
def test_log_probabilities_of_a_batch_are_those_of_each_row(batch: Batch, max_rows: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch.size, VOCAB, generator=rng).mul(4).to(torch.bfloat16)
    chosen = torch.randint(-1, VOCAB, (batch.size,), generator=rng, dtype=torch.int32)
    sampler = SamplerFixture(max_rows).sampler
    sampler.prepare(batch)
    found = sampler.logprobs(logits, chosen, batch)
    requested = [req.sampling_params.logprobs for req in batch.reqs]
    if found is None:
        assert requested == [None] * batch.size
        return
    for row, entry in enumerate(found.collect(chosen.tolist())):
        count = requested[row]
        assert (entry is None) == (count is None)
        if entry is not None and count is not None:
            logprob, top = logprobs_one(logits[row], int(chosen[row]), max(1, count))
            assert entry.token == int(chosen[row])
            assert entry.logprob == pytest.approx(logprob, abs=1e-5)
            assert [value for _, value in entry.top] == pytest.approx([value for _, value in top[:count]], abs=1e-5)


def test_a_row_keeps_its_processor_until_another_request_has_it() -> None:
    fixture, logits = SamplerFixture(), torch.zeros(1, VOCAB)
    biased, plain = (req_of(0, [1], [2], SamplingParams(logit_bias=bias)) for bias in ({5: 2.0}, {}))
    for _ in range(2):
        assert fixture.processed(logits, batch_of([biased]))[0][0, 5] == 2.0
        assert fixture.sampler.needs_postprocessing
    assert fixture.processed(logits, batch_of([plain]))[1] == []
    assert not fixture.sampler.needs_postprocessing


@pytest.mark.parametrize(
    ("sizes", "max_rows", "max_numbers", "parts"),
    [
        ([], 2, 10, []),
        ([1, 1, 1], 2, 10, [[1, 1], [1]]),
        ([4, 4, 4, 4], 9, 8, [[4, 4], [4, 4]]),
        ([9, 0, 9, 3], 9, 8, [[9], [0], [9], [3]]),
        ([0, 0, 9], 9, 9, [[0, 0, 9]]),
    ],
)
def test_parts_by_hand(sizes: list[int], max_rows: int, max_numbers: int, parts: list[list[int]]) -> None:
    assert [sizes[part] for part in row_parts(sizes, max_rows, max_numbers)] == parts


def test_parts_of_large_vocabularies_have_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_processors, "PART_BYTES", 4 * VOCAB * 3)
    found = [
        LogitsProcessor(CpuPlatform(), vocab, ROWS, WIDTH, masks_of(vocab)).max_rows
        for vocab in (VOCAB // 3, VOCAB, 7 * VOCAB)
    ]
    assert found == [8, 3, 1]


def test_the_longest_row_with_all_biases_fits_into_an_upload() -> None:
    bias = {token: float(token) for token in range(VOCAB)}
    req = req_of(0, [1] * 20, [2] * (WIDTH - 20), SamplingParams(repetition_penalty=2.0, logit_bias=bias))
    processor = LogitsProcessor(CpuPlatform(), VOCAB, 1, WIDTH, masks_of(VOCAB))
    own = RowProcessor.of(req.sampling_params, VOCAB)
    ((places, copy),) = processor.process(torch.ones(1, VOCAB), np.array([0]), [req], [own])
    expected = torch.ones(VOCAB)
    process_one(expected, req)
    assert places.tolist() == [0]
    assert torch.equal(copy[0], expected)


class _Operations(torch.utils._python_dispatch.TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_depend_on_the_rows() -> None:
    everything = SamplingParams(
        repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5, logit_bias={1: 1.0, 2: 3.0}, logprobs=3
    )

    def operations(size: int) -> int:
        sampler = SamplerFixture(64, rows=64).sampler
        batch = batch_of([req_of(row, [1, 2], [3, 4, row % 9], everything) for row in range(size)])
        sampler.prepare(batch)
        logits, chosen = torch.randn(size, VOCAB), torch.zeros(size, dtype=torch.int32)
        with _Operations() as seen:
            for _ in sampler.processed(logits, batch):
                pass
            sampler.logprobs(logits, chosen, batch)
        return seen.count

    assert 0 < operations(2) == operations(7) == operations(64) < 80
