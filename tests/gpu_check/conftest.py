from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.registry import DeviceFacts
from support.gpu.check import Context


class Notes:
    """Collects what a check notes."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}

    def __call__(self, **figures: Any) -> None:
        self.figures.update(figures)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """A CPU, with figures noted into ``context.note.figures``."""
    return Context(DeviceFacts("cpu"), True, tmp_path / "scratch", Notes())


@pytest.fixture
def figures(context: Context) -> Callable[[], dict[str, Any]]:
    """What a check of ``context`` has noted so far."""
    notes = context.note
    assert isinstance(notes, Notes)
    return lambda: notes.figures
