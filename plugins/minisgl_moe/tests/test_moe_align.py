"""Pairs sorted by expert in padded blocks, against a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernels need triton")

from minisgl_moe.triton_ops import align as module
from minisgl_moe.triton_ops.align import Alignment, align, block_bound


def run(ids: torch.Tensor, experts: int, block_m: int) -> tuple[list[int], list[int]]:
    """(slots in use, each block's expert); what the kernels must overwrite starts as garbage."""
    aligned = Alignment.empty(ids.numel(), experts, ids.device)
    for tensor in aligned:
        tensor.fill_(-777)
    align(*aligned, ids, experts, block_m)
    total = int(aligned.total)
    return aligned.slots[:total].tolist(), aligned.experts[: total // block_m].tolist()


def expected(ids: torch.Tensor, experts: int, block_m: int) -> tuple[list[int], list[int]]:
    slots: list[int] = []
    owners: list[int] = []
    flat = ids.flatten().tolist()
    for expert in range(experts):
        mine = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        blocks = -(-len(mine) // block_m)
        slots += mine + [len(flat)] * (blocks * block_m - len(mine))
        owners += [expert] * blocks
    return slots, owners


def test_case_72_four_tokens_of_one_expert() -> None:
    slots, owners = run(torch.zeros(4, 1, dtype=torch.int32), experts=1, block_m=16)
    assert slots == [0, 1, 2, 3] + [4] * 12
    assert owners == [0]


def test_case_72_all_to_the_last_expert() -> None:
    slots, owners = run(torch.full((7, 1), 4, dtype=torch.int32), experts=5, block_m=16)
    assert slots == [0, 1, 2, 3, 4, 5, 6] + [7] * 9
    assert owners == [4], "an expert without tokens has no block"


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "block_m"),
    [(1, 8, 128, 16), (9, 4, 60, 16), (70, 2, 3, 32), (200, 1, 2, 64), (40, 4, 60, 128)],
)
def test_any_grouping(tokens: int, top_k: int, experts: int, block_m: int) -> None:
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens)).topk(top_k).indices.int()
    ids[tokens // 2, top_k // 2] = -1
    assert run(ids, experts, block_m) == expected(ids, experts, block_m)


def test_several_chunks_of_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with tens of thousands of pairs, without the interpreter's patience."""
    monkeypatch.setattr(module, "_MOST_CHUNKS", 3)
    ids = torch.randint(-1, 5, (520, 2), generator=torch.Generator().manual_seed(0)).int()
    assert run(ids, 5, 16) == expected(ids, 5, 16)


def test_ids_that_name_no_expert_are_left_out() -> None:
    ids = torch.tensor([[-1, 3], [-2, 4], [2**31 - 1, 0]], dtype=torch.int32)
    assert run(ids, experts=4, block_m=16) == expected(ids, 4, 16)


def test_only_padding_has_no_blocks() -> None:
    assert run(torch.full((5, 2), -1, dtype=torch.int32), experts=3, block_m=16) == ([], [])


@settings(max_examples=15, deadline=None)
@given(data=st.data(), experts=st.integers(1, 9), pairs=st.integers(1, 40))
def test_any_ids(data: st.DataObject, experts: int, pairs: int) -> None:
    ids = data.draw(st.lists(st.integers(-1, experts - 1), min_size=pairs, max_size=pairs))
    tensor = torch.tensor(ids, dtype=torch.int32).view(pairs, 1)
    found = run(tensor, experts, 16)
    assert found == expected(tensor, experts, 16)
    assert len(found[1]) <= block_bound(pairs, experts, 16)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.sampled_from([16, 32, 64, 128]))
def test_the_bound_holds_and_is_reached(counts: list[int], block_m: int) -> None:
    pairs, experts = sum(counts), len(counts)
    if pairs:
        assert sum(-(-count // block_m) for count in counts) <= block_bound(pairs, experts, block_m)
    worst = block_bound(experts - 1 + 3 * block_m, experts, block_m)  # one expert holds all but one token of each other
    assert worst == experts - 1 + 3
