"""Every test in this folder is a GPU check: it takes a ``context``."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.gpu.check import Context
from support.gpu.collect import context_of


@pytest.fixture
def context(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Context:
    """That of ``make gpu-check``, or of a plain pytest run; skips where no GPU can be used."""
    found = context_of(request.config)
    if found.elsewhere:
        pytest.skip("needs an NVIDIA GPU")
    if found.scratch == Path():
        return Context(found.device, found.quick, tmp_path_factory.getbasetemp() / "gpu-check")
    return found
