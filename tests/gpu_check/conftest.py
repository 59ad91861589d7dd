from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(Path(__file__).parent)]

from gpu_check.checks import Here  # noqa: E402
from minisgl_core.registry import DeviceFacts  # noqa: E402


@pytest.fixture
def here(tmp_path: Path) -> Here:
    """A CPU, with figures noted into ``here.note.figures``."""
    return Here(DeviceFacts("cpu"), True, tmp_path / "scratch", Notes())


class Notes:
    """Collects what a check notes."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}

    def __call__(self, **figures: Any) -> None:
        self.figures.update(figures)


@pytest.fixture
def figures(here: Here) -> Callable[[], dict[str, Any]]:
    """What a check of ``here`` has noted so far."""
    notes = here.note
    assert isinstance(notes, Notes)
    return lambda: notes.figures
