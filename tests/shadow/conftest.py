from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def checked(integrity_check: None) -> None:
    """Books are checked in all modules of this folder."""
