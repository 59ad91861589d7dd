"""The settings of recordings and shadows: checked, and carried to every rank as the engine's observer factory."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.capsule.attention.observer import ObservedAttention
from minisgl_core.capsule.instrumentation import Instrumentation
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.engine.observer import ObserverFactory
from minisgl_core.errors import ConfigError
from minisgl_core.llm.arguments import engine_config
from minisgl_core.plugin_api import OP_NAMES

SETTINGS: dict[str, Any] = {
    "dtype": torch.float32,
    "device": "cpu",
    "max_running_req": 4,
    "num_page_override": 16,
    "max_seq_len_override": 64,
    "page_size": 4,
    "progress": False,
    "backends": {"attention": "torch", "moe": "torch", "graph": "eager"},
}


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("record", 5, "a folder"),
        ("record_role", "kv", "attention or moe"),
        ("record_steps", 5, "first:8"),
        ("record_max_mb", 0, "at least 1"),
        ("shadow", "torch", "attention"),
    ],
)
def test_wrong_values_are_refused_with_name_value_and_remedy(name: str, value: Any, remedy: str) -> None:
    for make in (Instrumentation, lambda **given: engine_config("model", None, 1, None, given)):
        with pytest.raises(ConfigError, match=rf"`{name}` is .*; (give|use) .*{remedy}") as caught:
            make(**{name: value})
        assert (caught.value.field, caught.value.exit_code) == (name, 2)
        assert caught.value.value is value


def test_good_values_of_every_kind() -> None:
    Instrumentation(record=Path("capsules"), record_steps="0,5", shadow={"attention": "torch", "every": "3"})


def test_an_llm_observes_only_where_something_is_requested() -> None:
    assert engine_config("model", None, 1, None, {"record_steps": "first:3"}).observer is None
    config = engine_config("model", None, 1, None, {"record": "x", "seed": 3})
    assert config.observer == Instrumentation(record="x") and config.seed == 3
    assert isinstance(config.observer, ObserverFactory)


def test_an_observer_of_the_callers_own_excludes_the_settings_of_another() -> None:
    mine = Instrumentation(record="mine")
    assert engine_config("model", None, 1, None, {"observer": mine}).observer is mine
    with pytest.raises(ConfigError, match=r"`observer` is given, and so is `record` or `shadow`, .*; leave out one"):
        engine_config("model", None, 1, None, {"observer": mine, "shadow": {"moe": "torch"}})


def test_the_settings_travel_to_other_processes() -> None:
    given = Instrumentation(record=Path("capsules"), record_steps="0,5", shadow={"moe": "torch", "every": "3"})
    assert pickle.loads(pickle.dumps(given)) == given


def test_a_recording_forces_eager_steps_and_a_shadow_does_not() -> None:
    def graphs(observer: Instrumentation | None) -> int | None:
        return EngineConfig("m", cuda_graph_max_bs=4, observer=observer).graph_max_bs

    assert [graphs(None), graphs(Instrumentation(shadow={"moe": "x"})), graphs(Instrumentation("here"))] == [4, 4, 0]


# The engine.


def built_by_the_registry(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every backend that the engine has the registry build, in order."""
    from minisgl_core.engine import backend_factory

    built: list[object] = []

    def build(choice: Any, setup: object) -> Any:
        backend = right(choice, setup)
        built.append(backend)
        return backend

    right = backend_factory.build
    monkeypatch.setattr(backend_factory, "build", build)
    return built


def attention_of(engine: Engine) -> list[object]:
    return [route.backend for routes in engine.attn_backend.routes.values() for route in routes]


def test_the_backends_of_an_unobserved_engine_are_the_objects_that_the_registry_built(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = built_by_the_registry(monkeypatch)
    engine = Engine(EngineConfig(str(tiny("moe")), **SETTINGS))
    served = [engine.comm, engine.ctx.kv, engine.ctx.linear, engine.ctx.moe, *attention_of(engine)]
    assert all(any(backend is one for one in built) for backend in served)
    for name in OP_NAMES:
        assert any(getattr(engine.ctx.ops, name).__self__ is one for one in built)
    assert engine.observer is None and engine.stepper.model is engine.model
    assert engine._run_step == engine.stepper.step, "no frame between a pass and the step"
    engine.shutdown()


def test_only_the_backends_of_an_observed_role_are_wrapped(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = built_by_the_registry(monkeypatch)
    engine = Engine(EngineConfig(str(tiny("moe")), observer=Instrumentation(record=tmp_path), **SETTINGS))
    assert all(type(backend) is ObservedAttention for backend in attention_of(engine))
    others = [engine.comm, engine.ctx.kv, engine.ctx.linear, engine.ctx.moe]
    assert all(any(backend is one for one in built) for backend in others)
    engine.shutdown()


def test_an_engine_imports_no_tooling() -> None:
    code = "import sys, minisgl_core.engine, minisgl_core.scheduler; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    packages = {name.split(".")[1] for name in found if name.startswith("minisgl_core.")}
    assert "engine" in packages
    assert packages & {"bench", "calibrate", "capsule", "doctor", "scaffold", "testing"} == set()
