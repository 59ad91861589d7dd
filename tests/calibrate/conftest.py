from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minisgl_core.env import ENV


@pytest.fixture(scope="module", autouse=True)
def integrity_check() -> Iterator[None]:
    """Every scheduler made here checks its books after every step; tests share two cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ENV.CHECK_INTEGRITY.value = True
    yield
    ENV.CHECK_INTEGRITY.reset()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def cache(own_cache: Path) -> Path:
    """Nothing that this machine measured counts, and nothing is left behind."""
    return own_cache
