"""Shared command-line handling of the scripts: an invalid call fails with one line before anything is measured.

A script creates a :class:`Parser` from its docstring, takes the types of its options from here, stores :func:`about`
with its figures, and ends with ``raise SystemExit(run(main))``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from minisgl_core.errors import MinisglError, UsageError
from minisgl_core.files import require_writable_file, write_whole

__all__ = ["Parser", "about", "amount", "keep", "need_gpu", "output", "positive", "run"]


class Parser(argparse.ArgumentParser):
    """A parser whose help is the script's docstring and whose errors are one line."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--commit", help="of this code, for the results; where no git checkout can say it")

    def error(self, message: str) -> NoReturn:
        """Print the error without the usage."""
        self.exit(2, f"error: {' '.join(message.split())}\n")


def about(options: argparse.Namespace, device: str = "auto") -> dict[str, Any]:
    """The facts stored with every result: commit, device, versions, command line."""
    from minisgl_core.bench.provenance import provenance

    return provenance(device, options.commit)


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def amount(text: str) -> float:
    """A number of at least 0, such as seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return value


def output(text: str) -> Path:
    """A file that can be written, checked now because results may come much later."""
    path = Path(text)
    try:
        require_writable_file(path, "the file", field="")
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def keep(content: Any, path: Path, *, indent: int | None = 1) -> None:
    """Write JSON data to a file that :func:`output` found fit. Raises :class:`UsageError` if it no longer is."""
    write_whole(path, json.dumps(content, indent=indent) + "\n", "the file", field="")


def need_gpu() -> None:
    """Raises :class:`UsageError` where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "this measures an NVIDIA GPU, and torch finds none here",
            field="device",
            remedy="run it where nvidia-smi lists one, with a torch for CUDA",
        )


def run(main: Callable[[], int | None]) -> int:
    """Run a script's ``main`` and return its exit code: 2, with one line of error, for an invalid call."""
    try:
        return main() or 0
    except MinisglError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
