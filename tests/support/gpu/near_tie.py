"""Answers compared with expected ones to their end. Where two engines choose different tokens after the same ones, that
is either a near-tie, which rounding explains, or a fault; behind a near-tie the answer is teacher-forced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from minisgl_core.builtin.ops import ComposedOps
from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.engine.sampler import pack_params
from minisgl_core.plugin_api import SampleArgs, SamplingMode

from .check import Context
from .serving import settings_for

__all__ = ["Comparison", "Fault", "NearTieJudge", "compare_to_the_end", "is_near_tie", "pick"]

LONGEST: Final = 1024


def pick(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The token that the core's own sampling takes from logits (V,), for a request with these parameters and a seed."""
    row = torch.from_numpy(pack_params(params, params.seed or 0).copy())[None]
    floats = row.view(torch.float32)
    args = SampleArgs(
        temperature=floats[:, 0],
        top_p=floats[:, 2],
        min_p=floats[:, 3],
        top_k=row[:, 1],
        seed_lo=row[:, 4],
        seed_hi=row[:, 5],
        positions=torch.tensor([position], dtype=torch.int32),
    )
    mode: SamplingMode = "greedy" if params.is_greedy else "filtered"
    setup: Any = None  # sampling needs none
    return int(ComposedOps(setup).sample(logits[None], args, mode))


def is_near_tie(
    logits: torch.Tensor, params: SamplingParams, position: int, tokens: tuple[int, int], tolerance: float
) -> bool:
    """Whether logits moved by ``tolerance`` of their range, towards one of two tokens, give that one, for both."""
    step = tolerance * float(logits.max() - logits.min())
    first, second = tokens
    for favoured, other in ((first, second), (second, first)):
        moved = logits.clone()
        moved[favoured] += step
        moved[other] -= step
        if pick(moved, params, position) != favoured:
            return False
    return True


class NearTieJudge:
    """Computes the logits after any tokens, in float32 and in one pass. Use it as a context manager."""

    def __init__(self, context: Context, model: Path) -> None:
        settings = settings_for(
            context,
            page_size=1,
            pool_tokens=LONGEST,
            max_running_req=1,
            max_seq_len_override=LONGEST,
            cuda_graph_max_bs=0,
        )
        self._engine = Engine(EngineConfig(str(model), dtype=torch.float32, **settings))

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """(V,) float32 on the host"""
        engine = self._engine
        engine.state.set_slots(0, 0, np.arange(LONGEST, dtype=np.int32))
        req = Req(torch.tensor(tokens, dtype=torch.int32), 0, 0, 1, 0, SamplingParams(max_tokens=1))
        batch = Batch(reqs=[req], phase="prefill")
        return engine.forward_batch(batch, engine.sampler.prepare(batch)).logits[0].float().cpu().clone()

    def __enter__(self) -> NearTieJudge:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.shutdown()


@dataclass(frozen=True)
class Fault:
    """A position that differs without a near-tie. None: one of the two answers ends before it."""

    answer: int
    position: int
    got: int | None
    wanted: int | None


@dataclass
class Comparison:
    """Counts over all answers. Without a fault, ``compared + near_ties`` are the tokens that were expected."""

    answers: int = 0
    compared: int = 0
    """Positions outside of near-ties whose token was compared"""
    near_ties: int = 0
    """Positions with another token that rounding explains; the expected one was fed instead"""
    followed: int = 0
    """Answers that were followed to their end"""
    faults: list[Fault] = field(default_factory=list)

    def __iadd__(self, other: Comparison) -> Comparison:
        self.answers += other.answers
        self.compared += other.compared
        self.near_ties += other.near_ties
        self.followed += other.followed
        self.faults += other.faults
        return self

    @property
    def figures(self) -> dict[str, int]:
        """For a report."""
        return {
            "answers": self.answers,
            "compared": self.compared,
            "near_ties": self.near_ties,
            "followed": self.followed,
        }


def compare_to_the_end(
    expected: Sequence[Sequence[int]],
    answer: Callable[[Mapping[int, int]], Sequence[Sequence[int]]],
    explained: Callable[[int, int, int], bool],
) -> Comparison:
    """Compare every position of every expected answer.

    ``answer({index: fed})`` returns, for each of these requests, the tokens that follow its prompt and the first
    ``fed`` tokens of its expected answer. It is called for all requests, then again for those that met a near-tie,
    which continue behind it.
    ``explained(index, position, token)``: may rounding explain ``token`` after the expected tokens before it?
    An answer with a fault is not followed further.
    """
    found = Comparison(answers=len(expected))
    fed = dict.fromkeys(range(len(expected)), 0)
    while fed:
        again = {}
        for index, got in zip(fed, answer(fed), strict=True):
            position = _compare_one(found, index, expected[index], fed[index], got, explained)
            if position is not None:
                again[index] = position
        fed = again
    return found


def _compare_one(
    found: Comparison,
    index: int,
    wanted: Sequence[int],
    start: int,
    got: Sequence[int],
    explained: Callable[[int, int, int], bool],
) -> int | None:
    """The position from which to go on, or None at the answer's end or a fault."""
    tail = list(wanted[start:])
    equal = next((i for i, (a, b) in enumerate(zip(got, tail, strict=False)) if a != b), min(len(got), len(tail)))
    found.compared += equal
    position = start + equal
    mine, theirs = (list(side[equal : equal + 1]) for side in (got, tail))
    if mine and theirs and explained(index, position, mine[0]):
        found.near_ties += 1
        position += 1
        if position < len(wanted):
            return position
    elif mine or theirs:
        found.compared += 1
        found.faults.append(Fault(index, position, *(side[0] if side else None for side in (mine, theirs))))
        return None
    found.followed += 1
    return None
