"""Tables and JSON on standard output."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

__all__ = ["json_option", "print_json", "print_table"]

F = TypeVar("F", bound=Callable[..., Any])


def json_option(function: F) -> F:
    """Adds ``--json`` as the argument ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def print_json(data: object) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(data, indent=2))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print left-aligned columns, the last of any width; the text is the same for terminals and pipes."""
    table = [list(map(str, row)) for row in (headers, *rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(headers))]
    for row in table:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
