from __future__ import annotations

from collections.abc import Iterator

import pytest

from minisgl_core.inputs import warn_once


@pytest.fixture(autouse=True)
def every_warning() -> Iterator[None]:
    """Each test sees the warnings that a process prints once."""
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()
