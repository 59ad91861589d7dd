"""Answers compared with expected ones to their end: past a near-tie they are teacher-forced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Comparison", "Fault", "compare_to_the_end"]


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
    is_near_tie: Callable[[int, int, int], bool],
) -> Comparison:
    """Compare every position of every expected answer.

    ``answer({index: fed})``: for each of these requests what follows its prompt and the first ``fed`` tokens of its
    expected answer. It is called for all requests, then again for those that met a near-tie, which go on behind it.
    ``is_near_tie(index, position, token)``: may rounding explain ``token`` after the expected tokens before it?
    An answer with a fault is not followed further.
    """
    found = Comparison(answers=len(expected))
    fed = dict.fromkeys(range(len(expected)), 0)
    while fed:
        again = {}
        for index, got in zip(fed, answer(fed), strict=True):
            position = _compare_one(found, index, expected[index], fed[index], got, is_near_tie)
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
    is_near_tie: Callable[[int, int, int], bool],
) -> int | None:
    """The position from which to go on, or None at the answer's end or a fault."""
    tail = list(wanted[start:])
    equal = next((i for i, (a, b) in enumerate(zip(got, tail, strict=False)) if a != b), min(len(got), len(tail)))
    found.compared += equal
    position = start + equal
    mine, theirs = (list(side[equal : equal + 1]) for side in (got, tail))
    if mine and theirs and is_near_tie(index, position, mine[0]):
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
