"""``minisgl generate``: answers prompts and exits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from minisgl_core.errors import EngineError, UsageError
from minisgl_core.settings.schema import Settings

from .held_log import log_held
from .options import settings_options
from .output import json_option, print_json
from .prompts import Prompt, read_prompts
from .sampling import sampling_options, sampling_params
from .start import (
    backends_by_role,
    find_model,
    need_tokenizer,
    refuse_choice,
    refuse_early,
    report_shadow,
    shows_progress,
    start_llm,
)

if TYPE_CHECKING:
    from minisgl_core.core import SamplingParams
    from minisgl_core.llm import LLM
    from minisgl_core.registry import Plan

__all__ = ["command"]

_SHOWN: Final = 60
"""Characters of a prompt that are shown above its answer, if there are several."""


@click.command(name="generate")
@click.option("--prompt", "-p", "texts", multiple=True, metavar="TEXT", help="Text to continue; repeatable.")
@click.option("--prompt-ids", "id_lists", multiple=True, metavar="IDS", help="Token ids such as 1,2,3; repeatable.")
@click.option("--prompt-file", "files", multiple=True, metavar="FILE", help="A file's text; - = standard input.")
@click.option("--chat", is_flag=True, help="Apply the chat template: each prompt is a user message.")
@click.option("--system", metavar="TEXT", help="System message before it; requires --chat.")
@sampling_options
@settings_options("model", "engine", "debug")
@click.option("--input", "source", metavar="FILE", help="Requests as JSON lines; - = standard input.")
@click.option(
    "--output", "target", metavar="FILE", help="With --input: the answers as JSON lines. [-, standard output]"
)
@json_option
@click.option("--plan", "whole_plan", is_flag=True, help="With --json: include the whole plan.")
def command(
    settings: Settings,
    texts: Sequence[str],
    id_lists: Sequence[str],
    files: Sequence[str],
    chat: bool,
    system: str | None,
    source: str | None,
    target: str | None,
    as_json: bool,
    whole_plan: bool,
    **sampling: Any,
) -> int:
    """Generate answers to prompts.

    Without a prompt option the prompt is read from piped standard input. Without a model the demo model is used, and
    downloaded if necessary. Only the answer is written to standard output, while it is generated.

    --json prints one object with text, token_ids, finish_reason, usage and backends, by role. For several prompts it
    has outputs, a list of objects with the first four in the order of the prompts; usage, their sums; and backends.
    --plan adds the plan.

    --input reads a file with one request per line, such as {"id": "a", "prompt": "Hello", "max_tokens": 8}. A prompt is
    a text or a list of token ids; messages may replace it. Any sampling parameter may follow, and takes precedence over
    its flag. A line without an id gets its number. Each answer is appended to --output when it is complete, with its
    id; if the command is run again, answered requests are skipped. A line that cannot be answered is reported on
    standard error, and the exit code is 1.
    """
    if system is not None and not chat:
        raise UsageError("--system is given without --chat", field="--system", value=system, remedy="add --chat")
    _refuse_mixture(
        {"--input": source, "--output": target, "--json": as_json, "--plan": whole_plan}, texts, id_lists, files
    )
    params = sampling_params(sampling)
    if source is not None:
        from .batch import run_batch

        return run_batch(settings, source, target or "-", sampling, chat=chat, system=system)
    prompts = read_prompts(texts, id_lists, files)
    refuse_choice(settings)
    path = find_model(settings)
    messages = _messages(prompts, path, system, chat)
    refuse_early(messages, params, settings, path)
    from minisgl_core.llm import LLM

    with start_llm(LLM, settings, path, requests=len(prompts)) as llm, report_shadow(llm):
        if as_json:
            _print_json(llm.generate(messages, params, progress=shows_progress()), llm.plan, whole_plan)
        elif len(prompts) == 1:
            _stream(llm, messages[0], params)
        else:
            _print_all(llm, messages, params, prompts)
    return 0


def _refuse_mixture(given: Mapping[str, Any], *prompts: Sequence[str]) -> None:
    for flag, other in (("--output", "--input"), ("--plan", "--json")):
        if given[flag] and not given[other]:
            raise UsageError(f"{flag} is given without {other}", field=flag, remedy=f"add {other}")
    if given["--input"] is not None and (given["--json"] or any(prompts)):
        what = "--json is" if given["--json"] else "prompts are"
        raise UsageError(f"{what} given together with --input", field="--input", remedy="give one or the other")


def _messages(prompts: list[Prompt], path: Path, system: str | None, chat: bool) -> list[Prompt]:
    """The prompts as the model receives them. Refuses prompts that this model's tokenizer cannot encode."""
    if not isinstance(prompts[0], str):
        if chat:
            raise UsageError("--chat cannot wrap --prompt-ids", field="--chat", remedy="give text, or leave out --chat")
        return prompts
    tokenizer = need_tokenizer(path, chat=chat)
    if not chat:
        return prompts
    before = [] if system is None else [{"role": "system", "content": system}]
    return [tokenizer.apply_chat_template([*before, {"role": "user", "content": prompt}]) for prompt in prompts]


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    """Print the text while it is generated; for a model without tokenizer, the token ids."""
    start, count, reason, error = time.perf_counter(), 0, None, None
    with log_held():
        for chunk in llm.stream(prompt, params):
            text = chunk.text if _writes_text(llm) else "".join(f"{token} " for token in chunk.token_ids)
            click.echo(text, nl=False)
            count, reason, error = count + len(chunk.token_ids), chunk.finish_reason, chunk.error
        click.echo()
    if error is not None:
        raise EngineError(error)
    click.echo(f"{_speed(count, time.perf_counter() - start)}, finished by {reason}", err=True)


def _writes_text(llm: LLM) -> bool:
    return llm.tokenizer is not None and llm.tokenizer.refusal is None


def _speed(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s"


def _print_all(llm: LLM, messages: list[Prompt], params: SamplingParams, prompts: Sequence[Prompt]) -> None:
    """Print each answer below the beginning of its prompt, how each ended, and the total time."""
    start = time.perf_counter()
    answers = llm.generate(messages, params, progress=shows_progress())
    seconds = time.perf_counter() - start
    for index, (answer, prompt) in enumerate(zip(answers, prompts, strict=True)):
        shown = str(prompt)
        shown = repr(shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}...")
        click.echo(f"--- {shown}\n{answer['text'] if _writes_text(llm) else answer['token_ids']}")
        count = len(answer["token_ids"])
        click.echo(f"prompt {index}: {count} tokens, finished by {answer['finish_reason']}", err=True)
    click.echo(_speed(sum(len(answer["token_ids"]) for answer in answers), seconds), err=True)
    _raise_first_error(answers)


def _print_json(answers: Sequence[Mapping[str, Any]], plan: Plan, whole_plan: bool) -> None:
    outputs = [
        {
            "text": answer["text"],
            "token_ids": answer["token_ids"],
            "finish_reason": answer["finish_reason"],
            "usage": _usage([answer]),
        }
        for answer in answers
    ]
    head = outputs[0] if len(outputs) == 1 else {"outputs": outputs, "usage": _usage(answers)}
    whole = {"plan": plan.to_json()} if whole_plan else {}
    print_json({**head, "backends": backends_by_role(plan), **whole})
    _raise_first_error(answers)


def _usage(answers: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    prompt_tokens = sum(answer["prompt_tokens"] for answer in answers)
    completion_tokens = sum(len(answer["token_ids"]) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _raise_first_error(answers: Sequence[Mapping[str, Any]]) -> None:
    for index, answer in enumerate(answers):
        if "error" in answer:
            raise EngineError(f"prompt {index}: {answer['error']}")
