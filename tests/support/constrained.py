"""Grammars of tests: an answer of tokens with one remainder, which may end after some of them."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import numpy as np

from minisgl_core.core import SamplingParams
from minisgl_core.grammar import AnswerGrammar
from minisgl_core.plugin_api import Grammar, GrammarError, mask_words

__all__ = ["EVEN", "Evens", "Remainder", "packed"]

EVEN = Grammar.regex("even")
"""A grammar whose name says what :class:`Evens` makes of it."""


def packed(allowed: Collection[int], vocab_size: int) -> np.ndarray:
    """(W,) int32: the mask that allows these tokens."""
    bits = np.zeros(mask_words(vocab_size) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class Remainder:
    """A matcher of tokens that leave ``remainder`` when divided by 2. After ``length`` of them only end tokens follow;
    token number ``fails_at`` is refused.
    """

    def __init__(
        self,
        vocab_size: int,
        ends: Collection[int],
        length: int | None,
        fails_at: int | None = None,
        remainder: int = 0,
    ) -> None:
        self.accepted: list[int] = []
        self._length, self._fails_at, self._remainder = length, fails_at, remainder
        self._some = packed([t for t in range(remainder, vocab_size, 2) if t not in ends], vocab_size)
        self._ends = packed(ends, vocab_size)

    def fill_mask(self, row: np.ndarray) -> bool:
        row[:] = self._ends if len(self.accepted) == self._length else self._some
        return True

    def accept(self, token: int) -> bool:
        if len(self.accepted) == self._fails_at or token % 2 != self._remainder:
            return False
        self.accepted.append(token)
        return True


class Evens:
    """Implements ``AnswerGrammars``; ``matchers`` are those made so far."""

    seconds = 0.5

    def __init__(self, vocab_size: int, end: int, length: int | None = None, fails_at: int | None = None) -> None:
        self.matchers: list[Remainder] = []
        self._args: Any = (vocab_size, [end], length, fails_at)

    def prepare(self, grammar: Grammar) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def answer(self, params: SamplingParams) -> AnswerGrammar:
        assert params.grammar is not None
        if params.grammar != EVEN:
            raise GrammarError("no token begins such an answer")
        self.matchers.append(Remainder(*self._args))
        return AnswerGrammar(
            self.matchers[-1], self._args[1], self._args[0], ignore_eos=params.ignore_eos, min_tokens=params.min_tokens
        )

    def close(self) -> None:
        pass
