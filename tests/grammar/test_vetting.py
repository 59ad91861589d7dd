"""Grammars that hang, crash or need too much memory: refused by the child process, which then serves the next one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl_core.errors import AdmissionError
from minisgl_core.grammar import GrammarFacts, GrammarVetter
from minisgl_core.plan import Choice
from minisgl_core.plugin_api import Grammar, GrammarError, GrammarSetup

KINDS = ("regex", "choice")


class Hostile:
    """A backend whose regular expressions say what it does."""

    def __init__(self, setup: GrammarSetup, options: Any) -> None:
        self.setup = setup

    def compile(self, grammar: Grammar) -> Any:
        if grammar.text == "hang":
            time.sleep(600)
        elif grammar.text == "die":
            os._exit(3)
        elif grammar.text == "grow":
            self.memory = [np.ones(2**26) for _ in range(100)]  # 50 GiB
        elif grammar.text == "recurse":
            return self.compile(grammar)
        elif grammar.text == "wrong":
            raise GrammarError("it is wrong")
        elif grammar.text == "bug":
            raise KeyError("bug")
        return self

    def matcher(self) -> Any:
        return self

    def fill_mask(self, row: np.ndarray) -> bool:
        return False

    def accept(self, token: int) -> bool:
        return True

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def vetter(tiny: Callable[[str], Path]) -> Iterator[GrammarVetter]:
    choice = Choice("grammar", "hostile", "", "tests", "1", f"{__name__}:Hostile", grammars=KINDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        choice = Choice("grammar", "hostile", "", "tests", "1", "test_vetting:Hostile", grammars=KINDS)
        found = GrammarVetter(GrammarFacts(choice, str(tiny("q3-text")), 512, (511,)), timeout_s=3.0, memory_gb=1.0)
        yield found
        found.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hang", "more than 3 s to compile"),
        ("die", "more than 1 GiB of memory to compile, or crashes"),
        ("grow", "memory"),
        ("recurse", "RecursionError"),
        ("wrong", "it is wrong"),
        ("bug", "KeyError"),
    ],
)
def test_a_hostile_grammar_is_refused_and_the_next_one_is_served(vetter: GrammarVetter, text: str, says: str) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(AdmissionError, match=says):
            vetter.check(Grammar.regex(text))
    vetter.check(Grammar.regex("fine"))


def test_what_the_backend_does_not_declare_is_refused_by_name(vetter: GrammarVetter) -> None:
    with pytest.raises(AdmissionError, match="hostile@tests does not compile ebnf; it has regex, choice"):
        vetter.check(Grammar.ebnf('root ::= "a"'))


def test_a_model_without_an_end_token_serves_no_grammar(tiny: Callable[[str], Path]) -> None:
    choice = Choice("grammar", "hostile", "", "tests", "1", "test_vetting:Hostile", grammars=KINDS)
    bare = GrammarVetter(GrammarFacts(choice, str(tiny("q3-text")), 512, ()), 3.0, 1.0)
    with pytest.raises(AdmissionError, match="no end token"):
        bare.check(Grammar.regex("fine"))
