from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small(tiny: Callable[[str], Path]) -> Path:
    """The checkpoint that costs least: Mistral without a window, hidden 128."""
    return tiny("mistral-full")


@pytest.fixture
def random_prompt() -> Callable[..., list[int]]:
    """``random_prompt(40, seed=1)`` -> token ids."""

    def draw(length: int, seed: int = 0) -> list[int]:
        ids: list[int] = torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        return ids

    return draw


@pytest.fixture(params=[True, False], ids=["overlap", "plain"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
