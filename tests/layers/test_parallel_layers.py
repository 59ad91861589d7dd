"""Tensor-parallel layers on faked ranks: the pieces add up to the whole, and impossible cuts are refused."""

from __future__ import annotations

import pytest
import torch

from minisgl_core.builtin.linear import PlainLinear
from minisgl_core.core import Context
from minisgl_core.distributed import DistributedInfo
from minisgl_core.errors import ConfigError
from minisgl_core.layers import ColumnMergedLinear, LMHead, QKVLinear, RowLinear, VocabEmbedding


class PlainIndex:
    def index(self, table, ids, start, rows):
        inside = (ids >= start) & (ids < start + rows)
        return table[(ids - start).clamp(0, table.shape[0] - 1)] * inside[:, None]


class NoSum:
    """A rank whose all-reduce is left to the test."""

    def all_reduce(self, x):
        return x

    def all_gather(self, x):
        return x


def rank_of(rank: int, size: int) -> Context:
    return Context(
        config=None,
        tp=DistributedInfo(rank, size),
        device=torch.device("cpu"),
        dtype=torch.float32,
        platform=None,
        comm=NoSum(),
        kv=PlainIndex(),
        ops=None,
        linear=PlainLinear(None),
    )


def fill(layer, prefix: str, tensors: dict[str, torch.Tensor]):
    """Load a layer the way the loader does; returns it."""
    for target in layer.weight_targets(prefix, tensors.keys()):
        assert tuple(tensors[target.name].shape) == target.shape
        target.storage.copy_(tensors[target.name][target.index])
    layer.finish()
    return layer


def test_case_7_row_parallel_bias_counts_once():
    tensors = {"o_proj.weight": torch.zeros(3, 4), "o_proj.bias": torch.ones(3)}
    total = torch.zeros(2, 3)
    for rank in range(2):
        layer = fill(RowLinear(rank_of(rank, 2), 3, 4, bias=True), "o_proj.", tensors)
        total += layer.partial(torch.randn(2, 2))
    assert torch.equal(total, torch.ones(2, 3))


def test_merged_columns_hold_each_parts_own_rows():
    parts = {name: (torch.randn(6, 5), torch.randn(6)) for name in ("gate_proj", "up_proj")}
    tensors = {
        f"mlp.{name}.{kind}": t
        for name, both in parts.items()
        for kind, t in zip(("weight", "bias"), both, strict=True)
    }
    x = torch.randn(4, 5)
    for rank in range(2):
        layer = ColumnMergedLinear(rank_of(rank, 2), 5, {"gate_proj": 6, "up_proj": 6}, bias=True)
        out = fill(layer, "mlp.gate_up_proj.", tensors).forward(x)
        mine = slice(rank * 3, rank * 3 + 3)
        expected = torch.cat([x @ weight[mine].T + bias[mine] for weight, bias in parts.values()], dim=-1)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(("q_heads", "kv_heads", "size"), [(16, 2, 4), (8, 1, 4), (8, 4, 2), (4, 4, 4), (4, 2, 1)])
def test_case_3_kv_heads_are_replicated_below_one_per_rank(q_heads, kv_heads, size):
    dim, hidden = 4, 6
    tensors = {
        f"a.{name}_proj.{kind}": torch.randn(*((heads * dim, hidden) if kind == "weight" else (heads * dim,)))
        for name, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads))
        for kind in ("weight", "bias")
    }
    x = torch.randn(3, hidden)
    for rank in range(size):
        layer = fill(QKVLinear(rank_of(rank, size), hidden, q_heads, kv_heads, dim, bias=True), "a.qkv_proj.", tensors)
        local_kv = max(1, kv_heads // size)
        first_kv = rank * kv_heads // size
        q = slice(rank * q_heads // size * dim, (rank + 1) * q_heads // size * dim)
        kv = slice(first_kv * dim, (first_kv + local_kv) * dim)
        parts = [(q, "q"), (kv, "k"), (kv, "v")]
        expected = torch.cat(
            [x @ tensors[f"a.{n}_proj.weight"][s].T + tensors[f"a.{n}_proj.bias"][s] for s, n in parts], dim=-1
        )
        torch.testing.assert_close(layer.forward(x), expected)


def test_case_3_an_impossible_cut_names_all_three_numbers():
    with pytest.raises(ConfigError, match=r"9 query heads and 3 kv heads .* 2 tensor-parallel"):
        QKVLinear(rank_of(0, 2), 8, 9, 3, 4)
    with pytest.raises(ConfigError, match=r"width 7 cannot be divided over 2"):
        ColumnMergedLinear(rank_of(0, 2), 5, {"gate_proj": 7})


@pytest.mark.parametrize(("vocab", "size"), [(10, 4), (9, 2), (8, 1), (3, 4)])
def test_vocabulary_that_does_not_divide_is_padded(vocab, size):
    table = torch.randn(vocab, 5)
    ids = torch.arange(vocab, dtype=torch.int32)
    total = torch.zeros(vocab, 5)
    columns = []
    x = torch.randn(2, 5)
    for rank in range(size):
        ctx = rank_of(rank, size)
        embedding = fill(VocabEmbedding(ctx, vocab, 5), "e.", {"e.weight": table})
        total += embedding.forward(ids)
        head = fill(LMHead(ctx, vocab, 5), "h.", {"h.weight": table})
        columns.append(ctx.linear.forward(x, head._prepared))
    torch.testing.assert_close(total, table)
    torch.testing.assert_close(torch.cat(columns, dim=-1)[:, :vocab], x @ table.T)


def test_a_tied_head_is_the_embedding_itself():
    ctx = rank_of(0, 1)
    embedding = fill(VocabEmbedding(ctx, 6, 4), "e.", {"e.weight": torch.randn(6, 4)})
    head = LMHead(ctx, 6, 4, tied=embedding)
    assert list(head.weight_targets("lm_head.", {"lm_head.weight"})) == []
    head.finish()
    assert head.weight.data_ptr() == embedding.weight.data_ptr()
    head.untie()
    assert head.weight.data_ptr() != embedding.weight.data_ptr()
