from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def checked(integrity_check: None) -> None:
    """Books are checked in all modules of this folder."""


@pytest.fixture(autouse=True)
def cache(own_cache: Path) -> Path:
    """Nothing that this machine measured counts, and nothing is left behind."""
    return own_cache
