"""The sampling options of the commands that generate text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from minisgl_core.errors import UsageError

if TYPE_CHECKING:
    from minisgl_core.core import SamplingParams

__all__ = ["sampling_names", "sampling_options", "sampling_params"]

F = TypeVar("F", bound=Callable[..., Any])

_NUMBERS: Final[tuple[tuple[str, type, str], ...]] = (
    ("max_tokens", int, "Most tokens to generate. [1024]"),
    ("temperature", float, "0 = always the likeliest token. [0]"),
    ("top_k", int, "Sample among the k likeliest tokens; 0 = all. [0]"),
    ("top_p", float, "Sample among the likeliest tokens that make up this probability. [1]"),
    ("min_p", float, "Sample among tokens at least this share as likely as the likeliest. [0]"),
    ("repetition_penalty", float, "Above 1 makes tokens of prompt and answer less likely. [1]"),
    ("presence_penalty", float, "Taken from the logit of each token already generated. [0]"),
    ("frequency_penalty", float, "The same, times how often it was generated. [0]"),
)
"""Field of SamplingParams, type, help. Defaults are repeated here, because importing SamplingParams imports NumPy."""


def sampling_options(function: F) -> F:
    """Adds a flag for every sampling parameter. The command receives the values given, and None for the others."""
    add: list[Callable[[F], F]] = [
        click.option(_flag(name), type=kind, metavar="N" if kind is int else "X", help=text)
        for name, kind, text in _NUMBERS
    ]
    add += [
        click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
        click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this id; repeatable."),
        click.option("--ignore-eos", is_flag=True, help="Do not end at the model's end tokens."),
        click.option(
            "--grammar",
            metavar="KIND=TEXT",
            callback=_grammar,
            help="Form of the answer, such as regex=[0-9]+, json_object, or json_schema=@FILE.",
        ),
    ]
    for option in reversed(add):
        function = option(function)
    return function


def _grammar(_context: click.Context, _option: click.Parameter, given: str | None) -> dict[str, Any] | None:
    """``KIND=TEXT`` as SamplingParams takes it; a choice is a JSON list, a structural tag a JSON object."""
    if given is None:
        return None
    kind, _, text = given.partition("=")
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the file of --grammar cannot be read: {error}", field="--grammar", value=given, remedy="name a file"
            ) from error
    if kind == "json_object":
        return {kind: not text}
    if kind in ("choice", "structural_tag"):
        try:
            return {kind: json.loads(text)}
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"the {kind} of --grammar is no JSON: {error}", field="--grammar", value=given, remedy="give JSON"
            ) from error
    return {kind: text}


def sampling_names() -> tuple[str, ...]:
    """The fields of SamplingParams."""
    from minisgl_core.core import SamplingParams

    return tuple(field.name for field in fields(SamplingParams))


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from the values of :func:`sampling_options`; raises ``AdmissionError`` for a value
    out of range.
    """
    from minisgl_core.core import SamplingParams

    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
