"""What the CUDA platform does to what all engines of a process share; torch's own functions are replaced here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl_core.builtin.platform import CudaPlatform


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has an entry for each time that cuBLAS had to give up its workspaces."""
    calls: list[str] = []

    def nothing(*_: Any, **__: Any) -> None:
        pass

    for name in ("set_device", "Stream", "set_stream", "default_stream", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, nothing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("cleared"), raising=False)
    return calls


def test_workspaces_stay_while_the_graphs_of_another_engine_write_to_them(cleared: list[str]) -> None:
    first, second = CudaPlatform(), CudaPlatform()
    first.close()
    assert cleared == []
    second.close()
    assert cleared == ["cleared"]


def test_a_platform_that_is_dropped_without_a_close_keeps_nothing(cleared: list[str]) -> None:
    dropped, closed = CudaPlatform(), CudaPlatform()
    del dropped
    closed.close()
    closed.close()
    assert cleared == ["cleared"] * 2
