"""Reads the prompts of ``minisgl generate``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import sys
import termios
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TextIO

from minisgl_core.errors import UsageError

__all__ = ["Prompt", "open_stdin", "read_prompts", "read_text"]

Prompt = str | list[int]
"""Text, or token ids."""
_MOST_DIGITS: Final = 1000
"""Python refuses to read a number of several thousand."""


def read_prompts(texts: Sequence[str], id_lists: Sequence[str], files: Sequence[str]) -> list[Prompt]:
    """The prompts of ``--prompt``, ``--prompt-ids`` or ``--prompt-file``; without any, all of piped standard input.

    Raises :class:`UsageError` for prompts of two kinds (whose order would be ambiguous), no prompt, an empty one, ids
    that are not numbers, and a file that cannot be read as text.
    """
    given = {"--prompt": texts, "--prompt-ids": id_lists, "--prompt-file": files}
    kinds = [flag for flag, values in given.items() if values]
    if len(kinds) > 1:
        raise UsageError(
            f"{' and '.join(kinds)} are given together",
            field=kinds[1],
            remedy="give prompts of one kind; its flag may be repeated",
        )
    if kinds and "-" not in files:
        _refuse_unread_stdin(kinds[0])
    if texts:
        return [_not_empty(text, "--prompt") for text in texts]
    if id_lists:
        return [_parse_ids(text) for text in id_lists]
    if files:
        return [_read_file(name) for name in files]
    if open_stdin().isatty():
        raise UsageError(
            "no prompt is given", field="--prompt", remedy="give --prompt TEXT, or pipe the text to standard input"
        )
    return [_read_stdin()]


def _refuse_unread_stdin(flag: str) -> None:
    """Raise :class:`UsageError` if standard input has text as well, which would not be read."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or no file at all
        descriptor = sys.stdin.fileno()
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode):
            waiting = found.st_size - os.lseek(descriptor, 0, os.SEEK_CUR)
        elif stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode):
            waiting = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0]
        else:
            return
        if waiting > 0:
            raise UsageError(
                f"standard input has text in addition to {flag}",
                field="stdin",
                remedy=f"leave out {flag} to read it, or redirect it: </dev/null",
            )


def open_stdin() -> TextIO:
    """Standard input; raises :class:`UsageError` if the program was started with it closed."""
    stdin: TextIO | None = sys.stdin  # then it is None, despite its annotation
    if stdin is None:
        raise UsageError("standard input is closed", field="stdin", remedy="run it in a terminal, or pipe text to it")
    return stdin


def read_text(read: Callable[[], str]) -> str:
    """Read standard input with ``read``; raises :class:`UsageError` if it is not text."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"standard input is not {error.encoding} text: {error.reason} at byte {error.start}",
            field="stdin",
            remedy=f"give {error.encoding.upper()} text",
        ) from error


def _parse_ids(text: str) -> Prompt:
    """``"1, 2,3"`` -> ``[1, 2, 3]``"""
    _not_empty(text.strip(), "--prompt-ids")
    ids = []
    for part in text.split(","):
        if not part.strip().isdecimal() or len(part) > _MOST_DIGITS:
            raise UsageError(
                f"--prompt-ids holds {part.strip()!r:.60}",
                field="--prompt-ids",
                value=part.strip(),
                remedy="give token ids with commas between them, like 785,6722,315",
            )
        ids.append(int(part))
    return list(ids)


def _read_file(name: str) -> Prompt:
    if name == "-":
        return _read_stdin()
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}"
    else:
        return _not_empty(_without_line_end(text), f"--prompt-file {name}")
    raise UsageError(
        f"prompt file {name!r} {problem}", field="--prompt-file", value=name, remedy="give a UTF-8 text file"
    )


def _read_stdin() -> Prompt:
    return _not_empty(_without_line_end(read_text(open_stdin().read)), "standard input")


def _without_line_end(text: str) -> str:
    """Remove the final line end that editors and ``echo`` add, because it would change the answer."""
    return text.removesuffix("\n").removesuffix("\r")


def _not_empty(text: str, source: str) -> str:
    if not text:
        raise UsageError(f"the prompt of {source} is empty", field=source, value=text, remedy="give at least one token")
    return text
