"""``minisgl generate --input``: answers many requests of a file together, and writes each answer as it finishes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from minisgl_core.errors import UsageError
from minisgl_core.progress import progress_bar

from .jsonl import Answers, Line, read_lines, same_file
from .start import find_model, need_tokenizer, refuse_choice, report_shadow, start_llm

if TYPE_CHECKING:
    from minisgl_core.llm import AsyncLLM
    from minisgl_core.settings.schema import Settings

__all__ = ["run_batch"]

_AHEAD: Final = 4
"""Requests submitted to the engine for each one that it serves at a time, so that it never waits for the next."""


@dataclass(slots=True)
class _Count:
    """Counts of the lines by outcome."""

    answered: int = 0
    tokens: int = 0
    failed: int = 0


def run_batch(
    settings: Settings, source: str, target: str, sampling: Mapping[str, Any], *, chat: bool, system: str | None
) -> int:
    """Answer the lines of ``source`` that have no answer in ``target``. Exits with 1 if a line could not be answered.

    ``chat`` applies the model's chat template to prompts of text, after a ``system`` message if there is one.
    """
    if same_file(source, target):
        raise UsageError("--input and --output are one file", field="--output", value=target, remedy="name another")
    lines = read_lines(source, sampling)
    refuse_choice(settings)
    with Answers.open(target) as answers:
        todo = [_in_template(line, system) if chat else line for line in lines.good if line.id not in answers.done]
        count = _Count(failed=len(lines.problems))
        for number, problem in lines.problems.items():
            click.echo(f"error: line {number}: {problem}", err=True)
        if not todo:
            _summarise(count, len(lines.good), 0.0)
        else:
            path = find_model(settings)
            _need_text(todo, path)
            _serve(settings, path, todo, answers, count, len(lines.good) - len(todo))
    return 1 if count.failed else 0


def _in_template(line: Line, system: str | None) -> Line:
    if not isinstance(line.prompt, str):
        return line
    before = [] if system is None else [{"role": "system", "content": system}]
    return Line(line.number, line.id, [*before, {"role": "user", "content": line.prompt}], line.params)


def _need_text(todo: list[Line], path: Path) -> None:
    """Refuse a model without tokenizer or chat template where all lines need one."""
    if all(isinstance(line.prompt, str) or line.is_chat for line in todo):
        need_tokenizer(path, chat=all(line.is_chat for line in todo))


def _serve(settings: Settings, path: Path, todo: list[Line], answers: Answers, count: _Count, skipped: int) -> None:
    from minisgl_core.llm import AsyncLLM

    llm = start_llm(AsyncLLM, settings, path, requests=len(todo))
    with ExitStack() as closing:
        closing.callback(llm.shutdown)
        closing.enter_context(report_shadow(llm))
        started, at_once = time.perf_counter(), _AHEAD * min(settings.engine.max_running_req, len(todo))
        closing.callback(lambda: _summarise(count, skipped, time.perf_counter() - started))
        asyncio.run(_answer_all(llm, todo, answers, count, at_once))


async def _answer_all(llm: AsyncLLM, todo: list[Line], answers: Answers, count: _Count, at_once: int) -> None:
    waiting = iter(todo)
    with progress_bar("requests", len(todo)) as bar:

        async def work() -> None:
            for line in waiting:
                await _answer(llm, line, answers, count)
                bar.update(1)

        await asyncio.gather(*(work() for _ in range(at_once)))


async def _answer(llm: AsyncLLM, line: Line, answers: Answers, count: _Count) -> None:
    """A request that is refused, or on which the model fails, leaves the others alone."""
    try:
        given: Any = line.prompt
        call = llm.chat(given, line.params) if line.is_chat else llm.generate([given], line.params)
        (answer,) = await call
        problem = answer.error or ""
    except UsageError as error:
        problem = error.headline.removeprefix("prompt 0: ")
    if problem:
        count.failed += 1
        click.echo(f"error: line {line.number}: {problem}", err=True)
        return
    answers.write(line.id, answer.to_dict())
    count.answered += 1
    count.tokens += sum(len(choice.token_ids) for choice in answer.choices or (answer,))


def _summarise(count: _Count, skipped: int, seconds: float) -> None:
    rate = f"{count.tokens} tokens in {seconds:.1f} s, {count.tokens / max(seconds, 1e-9):.1f} tokens/s"
    parts = [f"{count.answered} answered ({rate})" if count.answered else "0 answered"]
    parts += [f"{skipped} answered before"] * bool(skipped) + [f"{count.failed} failed"] * bool(count.failed)
    click.echo(", ".join(parts), err=True)
