"""Tries grammars in a child process: what hangs, crashes or needs too much memory there never reaches an engine."""

from __future__ import annotations

import math
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from minisgl_core.errors import AdmissionError, MinisglError
from minisgl_core.plugin_api import Grammar, GrammarError, mask_words
from minisgl_core.plugin_api.hooks import CORE
from minisgl_core.sandbox import Sandbox, SandboxError

from .setup import GrammarFacts, build_grammar_backend

if TYPE_CHECKING:
    from minisgl_core.plugin_api import GrammarBackend

__all__ = ["GrammarVetter", "start_vetting", "try_grammar"]

_START_S: Final = 120.0
"""For the imports of a library and the reading of a tokenizer, which are not the grammar's fault"""
_QUEUE_S: Final = 60.0
"""How long a grammar waits for those before it"""
_KEPT: Final = 1024
"""Verdicts that are remembered"""
_LONGEST: Final = 1 << 20
"""Characters of a grammar"""
_STACK: Final = 4 << 20
"""Bytes of the stack in the child; threads of an engine's process have twice as much"""


class GrammarVetter:
    """Says of each grammar whether it compiles within ``timeout_s`` and ``memory_gb``. Thread-safe; the child process
    is started by the first grammar, tries one after the other, and remembers verdicts.
    """

    def __init__(self, facts: GrammarFacts, timeout_s: float, memory_gb: float) -> None:
        self._facts, self._timeout_s, self._memory_gb = facts, timeout_s, memory_gb
        self._verdicts: OrderedDict[Grammar, str] = OrderedDict()
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = None

    def check(self, grammar: Grammar) -> None:
        """Raises :class:`AdmissionError` for a grammar that this engine cannot serve. It may block for seconds."""
        verdict = self._verdicts.get(grammar)
        if verdict is None:
            verdict = self._static_verdict(grammar) or self._tried(grammar)
            self._verdicts[grammar] = verdict
            while len(self._verdicts) > _KEPT:
                self._verdicts.popitem(last=False)
        if verdict:
            raise AdmissionError(f"the grammar cannot be used: {verdict}", field="grammar", value=grammar.text[:80])

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            self._end()

    def _static_verdict(self, grammar: Grammar) -> str:
        """Why it is refused untried; empty if it is not."""
        choice = self._facts.choice
        if grammar.kind not in choice.grammars:
            return f"{choice.label} does not compile {grammar.kind}; it has {', '.join(choice.grammars)}"
        if len(grammar.text) > _LONGEST:
            return f"it has {len(grammar.text)} characters, at most {_LONGEST} are allowed"
        if choice.distribution == CORE:
            return _compile(build_grammar_backend(self._facts), grammar)["refused"] or ""
        return "" if self._facts.end_ids else "the model has no end token, so no answer could end"

    def _tried(self, grammar: Grammar) -> str:
        if not self._lock.acquire(timeout=_QUEUE_S):
            raise AdmissionError("too many grammars wait to be compiled", field="grammar", remedy="try again later")
        try:
            known = self._verdicts.get(grammar)  # it may have been tried while this one waited
            return self._try(grammar) if known is None else known
        finally:
            self._lock.release()

    def _try(self, grammar: Grammar) -> str:
        try:
            sandbox = self._started()
            request = {"kind": grammar.kind, "text": grammar.text, "seconds": self._timeout_s}
            answer = sandbox.call(_TRY, request, timeout_s=self._timeout_s)
        except SandboxError as error:
            self._end()
            if error.timed_out:
                return f"it takes more than {self._timeout_s:g} s to compile"
            return f"it needs more than {self._memory_gb:g} GiB of memory to compile, or crashes the library"
        if not answer["ok"]:
            self._end()
            return str(answer["error"])
        if answer["value"]["grown"] > self._memory_gb * 2**30 / 4:
            self._end()  # what the library keeps must not count against later grammars
        return str(answer["value"]["refused"] or "")

    def _started(self) -> Sandbox:
        if self._sandbox is None:
            sandbox = Sandbox(_START_S)
            memory = int(self._memory_gb * 2**30)
            answer = sandbox.call(_START, {"facts": self._facts.to_json(), "memory": memory})
            if not answer["ok"]:
                sandbox.close()
                raise MinisglError(f"grammar backend {self._facts.choice.label} cannot be built: {answer['error']}")
            self._sandbox = sandbox
        return self._sandbox

    def _end(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()


# ---- in the child ----------------------------------------------------------------------------------------------------

_START: Final = f"{__name__}:start_vetting"
_TRY: Final = f"{__name__}:try_grammar"
_child: dict[str, Any] = {}
"""The backend of this process and its vocabulary's size; empty in every process but the child."""


def start_vetting(request: Mapping[str, Any]) -> None:
    """Build the backend, then limit the memory that this process may still take."""
    facts = GrammarFacts.from_json(request["facts"])
    _child.update(backend=build_grammar_backend(facts), vocab_size=facts.vocab_size)
    _compile(_child["backend"], Grammar.regex("a"), facts.vocab_size)  # what a library makes at its first use
    limit = _memory_in_use() + request["memory"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def try_grammar(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compile a grammar and fill its first mask, on a small stack: ``refused``, a text or None; ``grown``, bytes."""
    _limit_cpu(request["seconds"])
    grammar, before = Grammar(request["kind"], request["text"]), _memory_in_use()
    result = _on_small_stack(lambda: _compile(_child["backend"], grammar, _child["vocab_size"]))
    return {**result, "grown": _memory_in_use() - before}


def _limit_cpu(seconds: float) -> None:
    """End this process in time even if its parent, which would kill it, is gone."""
    used = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + 2 * seconds) + 1, hard))


def _on_small_stack(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    usual = threading.stack_size(_STACK)
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(call).result()
    finally:
        threading.stack_size(usual)


def _compile(backend: GrammarBackend, grammar: Grammar, vocab_size: int = 0) -> dict[str, Any]:
    try:
        compiled = backend.compile(grammar)
        compiled.matcher().fill_mask(np.zeros(mask_words(vocab_size), dtype=np.int32))
    except GrammarError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": "it needs too much memory to compile"}
    return {"refused": None}


def _memory_in_use() -> int:
    """Bytes of address space of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()
