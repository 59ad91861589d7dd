from __future__ import annotations

from collections.abc import Iterator

import pytest

from minisgl_core.env import ENV


@pytest.fixture(autouse=True)
def integrity_check() -> Iterator[None]:
    """Every scheduler made here checks its books after every step."""
    ENV.CHECK_INTEGRITY.value = True
    yield
    ENV.CHECK_INTEGRITY.reset()


@pytest.fixture(params=[True, False], ids=["overlap", "no-overlap"])
def overlap(request: pytest.FixtureRequest) -> Iterator[bool]:
    ENV.DISABLE_OVERLAP_SCHEDULING.value = not request.param
    yield request.param
    ENV.DISABLE_OVERLAP_SCHEDULING.reset()
