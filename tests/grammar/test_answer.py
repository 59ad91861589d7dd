"""The end of an answer: the rules around a matcher. Tokens 0 to 8 are text, 9 is an end token; masks are by hand."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl_core.grammar import AnswerGrammar
from minisgl_core.plugin_api import GrammarError, mask_words

END = 9
VOCAB = 40


class Scripted:
    """Allows the next set of a list; None = everything."""

    def __init__(self, *steps: set[int] | None) -> None:
        self.steps, self.place = steps, 0

    def fill_mask(self, row: np.ndarray) -> bool:
        step = self.steps[self.place]
        row.fill(-1)  # garbage that must be overwritten where it is read
        if step is None:
            return False
        row.fill(0)
        for token in step:
            row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        return True

    def accept(self, token: int) -> bool:
        step = self.steps[self.place]
        if step is not None and token not in step:
            return False
        self.place += 1
        return True


def answer(*steps: set[int] | None, ignore_eos: bool = False, min_tokens: int = 0) -> AnswerGrammar:
    return AnswerGrammar(Scripted(*steps), [END], VOCAB, ignore_eos=ignore_eos, min_tokens=min_tokens)


def allowed(one: AnswerGrammar) -> set[int] | None:
    row = np.full(mask_words(VOCAB), 0x5A5A5A5A, dtype=np.int32)
    if not one.fill_mask(row):
        assert (row == 0x5A5A5A5A).all()
        return None
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_it_is_finished_when_only_an_end_could_follow() -> None:
    one = answer({1, 33}, {2, END}, {END})
    assert allowed(one) == {1, 33} and not one.finished
    one.accept(33)
    assert allowed(one) == {2, END} and not one.finished
    one.accept(2)
    assert one.finished


def test_an_end_token_finishes_it() -> None:
    one = answer({1}, {2, END})
    one.accept(1)
    one.accept(END)
    assert one.finished


def test_an_empty_answer_takes_the_end_token() -> None:
    one = answer({END}, ignore_eos=True, min_tokens=3)
    assert not one.finished and allowed(one) == {END}
    one.accept(END)
    assert one.finished


def test_ignore_eos_forbids_the_end_while_other_tokens_may_follow() -> None:
    one = answer({1}, {2, END}, None, {END}, ignore_eos=True)
    one.accept(1)
    assert allowed(one) == {2}
    one.accept(2)
    assert END not in (allowed(one) or {END}) and 8 in (allowed(one) or ())
    one.accept(7)
    assert one.finished


def test_min_tokens_forbids_the_end_before_them() -> None:
    one = answer({1, END}, {1, END}, {1, END}, min_tokens=2)
    assert allowed(one) == {1}
    one.accept(1)
    assert allowed(one) == {1}
    one.accept(1)
    assert allowed(one) == {1, END}


def test_free_text_is_not_masked() -> None:
    one = answer(None, {1})
    assert allowed(one) is None
    one.accept(5)
    assert allowed(one) == {1}


def test_a_forbidden_token_and_a_dead_end_are_errors() -> None:
    one = answer({1}, set())
    with pytest.raises(GrammarError, match="token 2 does not continue"):
        one.accept(2)
    with pytest.raises(GrammarError, match="no token of the vocabulary"):
        one.accept(1)
    with pytest.raises(GrammarError, match="no token of the vocabulary"):
        answer(set())
