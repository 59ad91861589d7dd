"""A model that answers with given texts, behind the real tokenizer, templates and plan of an AsyncLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from minisgl_core.llm import AsyncLLM, Chunk, Completion
from minisgl_core.llm.output import PromptFacts
from minisgl_core.llm.prompts import PreparedPrompt
from minisgl_core.plan import Plan
from minisgl_core.registry import discover
from minisgl_core.registry.selection import offers_of

__all__ = ["ScriptedLLM", "plan_with_parsers"]


def plan_with_parsers(plan: Plan, **names: str) -> Plan:
    """The plan with these parsers, by part."""
    buckets = []
    for bucket in plan.buckets:
        if bucket.entry.role == "parser" and (name := names.get(bucket.entry.op or "")):
            offer = offers_of(f"parser:{name}", discover())[0]
            choice = replace(bucket.choice, name=name, factory=offer.spec.factory)
            bucket = replace(bucket, choice=choice)
        buckets.append(bucket)
    return replace(plan, buckets=tuple(buckets))


class ScriptedLLM:
    """``answers``: one text for each choice of the next request, as pieces. ``asked``: what was prepared."""

    def __init__(self, llm: AsyncLLM, plan: Plan) -> None:
        self._llm, self.plan = llm, plan
        self.answers: Sequence[Sequence[str]] = ()
        self.reason = "stop"
        self.asked: list[PreparedPrompt] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def says(self, *texts: str, cut: int = 3, reason: str = "stop") -> None:
        self.answers = [[text[at : at + cut] for at in range(0, len(text), cut)] for text in texts]
        self.reason = reason

    def prompt(self) -> str:
        """The text of the last prompt."""
        assert self._llm.tokenizer is not None
        return self._llm.tokenizer.decode([int(token) for token in self.asked[-1].input_ids])

    def open(self, prompt: PreparedPrompt) -> _Stream:
        self.asked.append(prompt)
        return _Stream(prompt, self.answers, self.reason)


class _Stream:
    def __init__(self, prompt: PreparedPrompt, answers: Sequence[Sequence[str]], reason: str) -> None:
        self._prompt, self._answers, self._reason = prompt, answers, reason
        self._chunks = self._all()
        self.prompt = PromptFacts(len(prompt.input_ids), 1)

    async def _all(self) -> AsyncIterator[Chunk]:
        for choice, pieces in enumerate(self._answers):
            for piece in pieces:
                yield Chunk(piece, [7], None, choice=choice)
            yield Chunk("", [], self._reason, choice=choice)  # type: ignore[arg-type]

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def aclose(self) -> None:
        pass

    def completion(self) -> Completion:
        made = [
            Completion("".join(one), [7] * len(one), self._reason, prompt_tokens=len(self._prompt.input_ids))  # type: ignore[arg-type]
            for one in self._answers
        ]
        return replace(made[0], cached_tokens=1, choices=tuple(made) if len(made) > 1 else None)
