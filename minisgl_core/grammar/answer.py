"""The grammar of one answer: which tokens may come next, and when the answer is complete."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from minisgl_core.plugin_api import GrammarError, mask_words

if TYPE_CHECKING:
    from collections.abc import Collection

    from minisgl_core.plugin_api import Matcher

__all__ = ["AnswerGrammar"]


class AnswerGrammar:
    """A backend's matcher with the rules of minisgl for the end of an answer.

    An answer ends when nothing but an end token could follow: :attr:`finished` is then true, and no end token is
    sampled. While the text may end or go on, end tokens are allowed, except with ``ignore_eos`` and before
    ``min_tokens`` tokens; these never prolong an answer that is complete, and never forbid the only tokens left.
    """

    __slots__ = (
        "_end_ids",
        "_end_mask",
        "_mask",
        "_matcher",
        "_num_tokens",
        "_open_until",
        "_restricts",
        "_spent_s",
        "finished",
    )

    def __init__(
        self,
        matcher: Matcher,
        end_ids: Collection[int],
        vocab_size: int,
        *,
        ignore_eos: bool = False,
        min_tokens: int = 0,
        spent_s: list[float] | None = None,
    ) -> None:
        """``spent_s``: the seconds spent here are added to its only item.

        Raises :class:`GrammarError` if no token of the vocabulary begins an answer.
        """
        self._matcher = matcher
        self._spent_s = [0.0] if spent_s is None else spent_s
        self._end_ids = frozenset(end_ids)
        self._end_mask = np.zeros(mask_words(vocab_size), dtype=np.uint32)
        for token in self._end_ids:
            self._end_mask[token // 32] |= np.uint32(1 << token % 32)
        self._open_until = float("inf") if ignore_eos else min_tokens
        """Number of tokens before which end tokens are forbidden where others are allowed"""
        self._num_tokens = 0
        self._mask = np.zeros(mask_words(vocab_size), dtype=np.uint32)
        self._restricts = True
        self.finished = False
        """The answer is complete."""
        self._update()
        self.finished = False  # even an empty answer takes a token: the one that ends it

    def fill_mask(self, row: np.ndarray) -> bool:
        """Copy the mask of the next token into ``row`` (W,) int32, as :meth:`Matcher.fill_mask` describes it. False:
        nothing is masked, and ``row`` is left alone.
        """
        if self._restricts:
            row.view(np.uint32)[:] = self._mask
        return self._restricts

    def accept(self, token: int) -> None:
        """Append a sampled token, and find out what may follow it.

        Raises :class:`GrammarError` for a token that the mask forbids, and where nothing can follow.
        """
        if token in self._end_ids:
            self.finished = True
            return
        begun = time.perf_counter()
        if not self._matcher.accept(token):
            raise GrammarError(f"token {token} does not continue the grammar")
        self._num_tokens += 1
        self._update()
        self._spent_s[0] += time.perf_counter() - begun

    def _update(self) -> None:
        is_open = self._num_tokens < self._open_until
        self._restricts = self._matcher.fill_mask(self._mask.view(np.int32))
        if not self._restricts:
            if is_open:
                self._mask.fill(0xFFFFFFFF)
                self._mask &= ~self._end_mask
                self._restricts = True
            return
        others = self._mask & ~self._end_mask
        if others.any():
            if is_open:
                self._mask = others
        elif self._mask.any():
            self.finished = True
        else:
            raise GrammarError("no token of the vocabulary continues the answer as the grammar requires")
