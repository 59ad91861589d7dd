"""benchmarks/resolve.py, with margins for a machine that is busy with other tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minisgl_core.layers import attention

pytest.importorskip("minisgl_cpu_sim")


@pytest.fixture(scope="module")
def resolve() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "resolve.py"
    spec = importlib.util.spec_from_file_location("bench_resolve", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)  # as for a script
        spec.loader.exec_module(module)
    return module


def test_thirty_plugins_cost_little_and_no_torch(resolve: ModuleType) -> None:
    found = resolve.start_cost(plugins=30, runs=3)
    assert found["plugins"] >= 31 and found["torch_imported"] is False
    assert found["total_cpu_ms"] < 200, "100 is promised on a machine that does nothing else"


def test_a_layer_calls_the_method_of_the_chosen_backend_itself(
    resolve: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, batch = resolve._decode_batch(tmp_path)
    callers: list[Any] = []
    own = batch.attn.forward

    def seen(*arguments: Any) -> Any:
        callers.append(sys._getframe(1).f_code)
        return own(*arguments)

    monkeypatch.setattr(batch.attn, "forward", seen)
    engine.stepper.step(batch)
    engine.shutdown()
    assert callers == [attention.Attention.forward.__code__]
