"""Packed masks: who fills them, how they reach other ranks, and what they do to logits."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch

from minisgl_core.core import Req, SamplingParams
from minisgl_core.engine.masks import TokenMasks
from support.constrained import EVEN, packed

CPU = torch.device("cpu")


class FirstRank:
    """A communicator of the second rank: to what is added it adds the first rank's masks."""

    def __init__(self, words: np.ndarray) -> None:
        self._bytes = torch.from_numpy(words.copy()).view(torch.uint8)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype in (torch.float32, torch.float16, torch.bfloat16), "all that the contract promises"
        return x.add_(self._bytes.to(x.dtype))


class Fixed:
    def __init__(self, words: np.ndarray | None) -> None:
        self.words = words

    def fill_mask(self, row: np.ndarray) -> bool:
        if self.words is not None:
            row[:] = self.words
        return self.words is not None


def req_with(grammar: Any) -> Req:
    req = Req(torch.tensor([1], dtype=torch.int32), 0, 0, 1, 0, SamplingParams(grammar=EVEN))
    req.grammar = grammar
    return req


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 500, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_rank_leaves_the_allowed_tokens_alone_and_no_others(vocab_size: int, dtype: torch.dtype) -> None:
    draw = np.random.default_rng(vocab_size)
    sets = [np.flatnonzero(draw.random(vocab_size) < share) for share in (0.0, 0.1, 0.5, 1.0)]
    reqs = [req_with(Fixed(packed(some.tolist(), vocab_size))) for some in sets]
    reqs += [req_with(Fixed(None)), req_with(None)]
    first = TokenMasks(vocab_size, CPU)
    words = first.fill(reqs)
    second = TokenMasks(vocab_size, CPU, cast("Any", FirstRank(words)), is_primary=False, dtype=dtype)
    logits = torch.randn(len(reqs), vocab_size)
    expected = torch.full_like(logits, -math.inf)
    for row, some in enumerate([*sets, np.arange(vocab_size), np.arange(vocab_size)]):
        expected[row, some] = logits[row, some]
    assert not second.fill(reqs).any()
    for masks, own in ((first, words), (second, second.fill(reqs))):
        found = logits.clone()
        masks.apply(found, torch.from_numpy(own))
        assert torch.equal(found, expected)
