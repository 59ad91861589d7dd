from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl_core.inputs import warn_once

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))


@pytest.fixture(autouse=True)
def every_warning() -> Iterator[None]:
    """Each test sees the warnings that a process prints once."""
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()
