"""Reqs whose numbers are kept in a table: the same Reqs, advanced together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl_core.core import Batch, Req, ReqTable, SamplingParams


def reqs_of(table: ReqTable | None) -> list[Req]:
    """Three, in rows 2, 0 and 3."""
    params = SamplingParams(max_tokens=4)
    return [
        Req(torch.arange(length, dtype=torch.int32) + 10 * row, row, cached, 4, row, params, table=table)
        for row, length, cached in ((2, 5, 1), (0, 3, 0), (3, 4, 2))
    ]


def facts(reqs: list[Req]) -> list[tuple[object, ...]]:
    return [
        (r.cached_len, r.device_len, r.extend_len, r.num_tokens, r.remain_len, r.can_decode, r.tokens.tolist())
        for r in reqs
    ]


def test_a_batch_advances_as_its_reqs_would_alone() -> None:
    table = ReqTable(4, 12)
    alone, together = reqs_of(None), reqs_of(table)
    rows = np.array([2, 0, 3])
    batch = Batch(together, "decode", table=table, table_idx=rows)
    for turn in range(4):
        assert facts(together) == facts(alone)
        batch.complete_one()
        for req in alone:
            req.complete_one()
        tokens = np.array([50, 60, 70], dtype=np.int32) + turn
        table.append_tokens(rows, tokens)
        for req, token in zip(alone, tokens.tolist(), strict=True):
            req.append_token(token)
    assert facts(together) == facts(alone)
    assert table.max_device_len[rows].tolist() == [req.max_device_len for req in alone]
    assert table.num_tokens[1] == 0, "a row without a request"


def test_batches_with_and_without_a_table_say_the_same() -> None:
    table = ReqTable(4, 12)
    by_table = Batch(reqs_of(table), "prefill", table=table, table_idx=np.array([2, 0, 3]))
    by_hand = Batch(reqs_of(None), "prefill")
    for batch in (by_table, by_hand):
        assert batch.rows_host().tolist() == [2, 0, 3]
        assert batch.cached_lens().tolist() == [1, 0, 2]
        assert batch.device_lens().tolist() == [5, 3, 4]
        batch.complete_one()
        assert [(req.cached_len, req.device_len) for req in batch.reqs] == [(5, 6), (3, 4), (4, 5)]


@pytest.mark.parametrize("table", [None, ReqTable(4, 12)])
def test_lengths_can_be_set_one_by_one(table: ReqTable | None) -> None:
    req, other, _ = reqs_of(table)
    req.cached_len, req.device_len = 2, 3
    assert (req.cached_len, req.device_len, req.extend_len) == (2, 3, 1)
    assert (other.cached_len, other.device_len) == (0, 3)
    assert all(type(n) is int for n in (req.cached_len, req.device_len, req.num_tokens))
