from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from minisgl_core.llm import LLM, AsyncLLM


@pytest.fixture(scope="module", autouse=True)
def checked(integrity_check: None) -> None:
    """Books are checked in all modules of this folder."""


@pytest.fixture(scope="module")
def expected(answers: Callable[[str], Any]) -> Any:
    """transformers' answers of the checkpoint with a tokenizer."""
    return answers("q3-text")


@pytest.fixture
def slow_down(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes each step of a model's scheduler take at least 10 ms (or ``seconds``), so a test can act in between."""

    def slow_down(llm: LLM | AsyncLLM, seconds: float = 0.01) -> None:
        step = llm.scheduler.step
        monkeypatch.setattr(llm.scheduler, "step", lambda: (time.sleep(seconds), step())[1])

    return slow_down


@pytest.fixture
def wait_until_idle() -> Callable[[LLM | AsyncLLM, float], None]:
    """Waits until a model's scheduler has nothing left to do."""

    def wait_until_idle(llm: LLM | AsyncLLM, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while llm.scheduler.has_work:
            assert time.monotonic() < deadline, llm.scheduler.stats
            time.sleep(0.005)

    return wait_until_idle
