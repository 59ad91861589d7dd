from __future__ import annotations

import pytest

from support.gpu.check import Context
from support.gpu.collect import context_of


@pytest.fixture
def context(request: pytest.FixtureRequest) -> Context:
    return context_of(request.config)
