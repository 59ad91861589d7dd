"""Compiled grammars, in the process of the engine."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from minisgl_core.plugin_api import Grammar, GrammarError

from .answer import AnswerGrammar
from .setup import build_grammar_backend

if TYPE_CHECKING:
    from minisgl_core.core import SamplingParams
    from minisgl_core.plugin_api import CompiledGrammar, GrammarBackend

    from .setup import GrammarFacts

__all__ = ["Grammars"]

_KEPT: Final = 64
"""Compiled grammars that are kept, the most recently used ones"""


class Grammars:
    """Compiles each grammar once, on a thread of its own, and makes the :class:`AnswerGrammar` of each answer.

    The backend is built when the first grammar arrives. Only grammars that
    :class:`~minisgl_core.grammar.GrammarVetter` has let pass should come here.
    """

    def __init__(self, facts: GrammarFacts) -> None:
        self._facts = facts
        self._backend: GrammarBackend | None = None
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="minisgl-compiler")
        self._compile_s = 0.0
        self._answers_s = [0.0]
        """Added to by each answer"""

    @property
    def seconds(self) -> float:
        """Spent so far: compiling, and advancing and filling masks."""
        return self._compile_s + self._answers_s[0]

    def prepare(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Compile it, unless that is done, in the background. The result may be a :class:`GrammarError`."""
        return self._thread.submit(self._compiled, grammar)

    def answer(self, params: SamplingParams) -> AnswerGrammar:
        """The state of one new answer. Quick where its grammar has been prepared. Raises :class:`GrammarError`."""
        assert isinstance(params.grammar, Grammar)
        return AnswerGrammar(
            self._compiled(params.grammar).matcher(),
            self._facts.end_ids,
            self._facts.vocab_size,
            ignore_eos=params.ignore_eos,
            min_tokens=params.min_tokens,
            spent_s=self._answers_s,
        )

    def close(self) -> None:
        """Wait for what is being compiled, and free everything."""
        self._thread.shutdown(cancel_futures=True)
        self._kept.clear()
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        with self._lock:
            if (found := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return found
        begun = time.perf_counter()
        if self._backend is None:
            self._backend = build_grammar_backend(self._facts)
        try:
            compiled = self._backend.compile(grammar)
        except MemoryError:
            raise GrammarError("there is not enough memory to compile it") from None
        with self._lock:
            self._compile_s += time.perf_counter() - begun
            self._kept[grammar] = compiled
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return compiled
