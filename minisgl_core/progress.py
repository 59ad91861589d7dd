"""Progress bars for long operations: text in a terminal, a widget in a notebook, nothing in a log."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

__all__ = ["progress_bar", "progress_counter"]


def progress_bar(title: str, total: int, *, shown: bool = True, leave: bool = False, unit: str = "it") -> Any:
    """A tqdm bar on stderr. ``unit`` "B" scales to kB and MB."""
    from tqdm.auto import tqdm

    stderr: TextIO | None = sys.stderr  # None if it was closed, whatever the annotations say
    hidden = None if shown and stderr is not None else True  # None: where it would be no bar
    return tqdm(total=total, desc=title, disable=hidden, leave=leave, unit=unit, unit_scale=unit == "B")


def progress_counter(title: str, total: int) -> Callable[[], None]:
    """A progress bar. The returned function advances it by one, and closes it at the end."""
    bar = progress_bar(title, total)

    def advance() -> None:
        bar.update(1)
        if bar.n >= total:
            bar.close()

    return advance
