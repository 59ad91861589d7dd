"""Finds the line of a backend that failed, for a report card."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable
from typing import Final

__all__ = ["line_of", "where_raised"]

_LIBRARIES: Final = re.compile(rf"{re.escape(sysconfig.get_path('stdlib'))}/(?!site-packages)|/torch/|^<")


def line_of(frames: Iterable[tuple[str, int | str | None, str]]) -> str:
    """The first frame (path, line, function) outside libraries, such as `` (kernel.py:12, in forward)``; empty if none.

    Frames are given innermost first.
    """
    for path, line, function in frames:
        if not _LIBRARIES.search(path):
            return f" ({os.path.basename(path)}:{line}, in {function})"
    return ""


def where_raised(error: BaseException) -> str:
    """The same for the first cause of an exception."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    return line_of((frame.filename, frame.lineno, frame.name) for frame in reversed(frames))
