"""A server of a tiny model, and OpenAI's own client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from minisgl_core.llm import LLM, AsyncLLM
from support.http_server import Served, serving
from support.settings import SHARED

pytest.importorskip("minisgl_cpu_sim")


@pytest.fixture(scope="package")
def model(tiny: Callable[[str], Path]) -> Path:
    return tiny("q3-text")


@pytest.fixture(scope="package")
def async_llm(model: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(model, **SHARED)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def served(async_llm: AsyncLLM) -> Iterator[Served]:
    with serving(async_llm) as server:
        yield server


@pytest.fixture(scope="package")
def alone(model: Path) -> Iterator[LLM]:
    """The same model without a server: what it answers is right."""
    with LLM(model, **SHARED) as llm:
        yield llm


@pytest.fixture
def client(served: Served) -> OpenAI:
    return served.client
