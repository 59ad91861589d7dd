"""Grammars on their way to the engine: what they are compiled for, and requests that wait until theirs is compiled."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any

from minisgl_core.grammar import GrammarFacts, Grammars
from minisgl_core.modelconfig import read_model_config
from minisgl_core.plugin_api import Grammar
from minisgl_core.scheduler import Abort, NewReq, TokenOut

if TYPE_CHECKING:
    from minisgl_core.engine import EngineConfig
    from minisgl_core.registry import Plan
    from minisgl_core.scheduler import Message

__all__ = ["GrammarQueue", "grammar_facts"]


def grammar_facts(config: EngineConfig, plan: Plan, eos_token_ids: Collection[int]) -> GrammarFacts:
    """What grammars are compiled for. ``eos_token_ids``: the tokenizer's."""
    model = read_model_config(config.model_path)
    ends = {token for token in (*eos_token_ids, *model.eos_token_ids) if token < model.vocab_size}
    return GrammarFacts(plan.choice("grammar"), str(config.model_path), model.vocab_size, tuple(sorted(ends)))


class GrammarQueue:
    """Requests whose grammar is being compiled. They join the others once it is; the engine does not wait for them."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self.waiting: dict[int, tuple[NewReq, Future[Any]]] = {}
        """By uid; read in every step"""

    def holds(self, message: Message) -> bool:
        """Take a request with a grammar. A message that ends one that waits here removes it."""
        if isinstance(message, NewReq) and isinstance(message.params.grammar, Grammar):
            self.waiting[message.uid] = message, self._grammars.prepare(message.params.grammar)
            return True
        return isinstance(message, Abort) and self.waiting.pop(message.uid, None) is not None

    def ready(self) -> tuple[list[Message], list[TokenOut]]:
        """Requests whose grammar is compiled, in their order, and the ends of those whose grammar failed."""
        ready: list[Message] = []
        failed: list[TokenOut] = []
        for uid, (message, compiled) in list(self.waiting.items()):
            if compiled.done():
                del self.waiting[uid]
                if (error := compiled.exception()) is None:
                    ready.append(message)
                else:
                    text = f"the grammar cannot be used: {error}"
                    failed += [TokenOut(uid + choice, None, "error", text) for choice in range(message.params.n)]
        return ready, failed

    def wait(self, timeout_s: float) -> None:
        """Until one of them is ready, if there is nothing else to do."""
        wait([compiled for _, compiled in self.waiting.values()], timeout_s, FIRST_COMPLETED)
