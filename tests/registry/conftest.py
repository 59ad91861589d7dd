"""In-memory distributions and plugin modules: nothing is installed for these tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minisgl_core.modelconfig import ModelConfig, MoEConfig, RopeConfig
from minisgl_core.plugin_api import ANY, HOOK_OF_ROLE, BackendSpec, Caps, PluginInfo, Role, hookimpl
from minisgl_core.registry import DeviceFacts, Plan, PlanQuery, PluginRecord, Registry, discover, resolve_plan
from support.settings import ANY_MODEL


class FakeDistribution(Distribution):
    """What importlib.metadata would read from a ``.dist-info`` folder at ``place``."""

    def __init__(self, texts: dict[str, str], place: str) -> None:
        self.texts, self.place = texts, place

    def read_text(self, filename: str) -> str | None:
        return self.texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(self.place) / path


class World:
    """Makes modules importable and collects the distributions that name them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.distributions: list[Distribution] = []

    def module(self, name: str, **attributes: Any) -> ModuleType:
        module = ModuleType(name)
        module.__file__ = f"/fake/{name}.py"
        for key, value in attributes.items():
            setattr(module, key, value)
        self._monkeypatch.setitem(sys.modules, name, module)
        return module

    def distribution(
        self,
        name: str | None,
        entry_points: str = "",
        *,
        version: str = "1.0",
        requires: Sequence[str] = (),
        place: str = "/fake/site",
        **files: str,
    ) -> FakeDistribution:
        headers = ["Metadata-Version: 2.1", *([f"Name: {name}"] if name else []), f"Version: {version}"]
        headers += [f"Requires-Dist: {item}" for item in requires]
        texts = {"METADATA": "\n".join(headers) + "\n\nA description.\n"}
        if entry_points:
            texts["entry_points.txt"] = entry_points
        texts |= {key.replace("__", "."): value for key, value in files.items()}
        made = FakeDistribution(texts, place)
        self.distributions.append(made)
        return made

    def plugin(self, name: str, *specs: BackendSpec, **distribution: Any) -> ModuleType:
        """A well-behaved plugin: distribution ``name`` whose module offers these specs."""
        roles = {spec.role for spec in specs}
        module = self.module(
            f"{name.replace('-', '_')}_plugin",
            MINISGL_PLUGIN=PluginInfo(name=name, api=dict.fromkeys(roles, ">=1,<2")),
            **{HOOK_OF_ROLE[role]: _hook([spec for spec in specs if spec.role == role]) for role in roles},
        )
        self.distribution(name, f"[minisgl]\nmain = {module.__name__}\n", **distribution)
        return module

    def registry(self, **lists: Any) -> Registry:
        return discover(self.distributions, **lists)

    def record(self, distribution: str, **lists: Any) -> PluginRecord:
        """What is known about the one plugin of this distribution."""
        (record,) = [plugin for plugin in self.registry(**lists).plugins if plugin.distribution == distribution]
        return record


def _hook(specs: list[BackendSpec]) -> Callable[[], list[BackendSpec]]:
    @hookimpl
    def offer() -> list[BackendSpec]:
        return specs

    return offer


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


FULL = {
    **ANY_MODEL,
    "devices": ("cpu", "cuda"),
    "sm": ANY,
    "dtypes": ("float32", "bfloat16"),
    "kv_dtypes": ("float32", "bfloat16"),
    "formats": ("plain",),
}


@pytest.fixture
def make_spec() -> Callable[..., BackendSpec]:
    """``make_spec(role, name, **caps and spec fields)``: by default it can do everything but special features."""

    def make(role: Role, name: str, **fields: Any) -> BackendSpec:
        caps = {**FULL, **{key: fields.pop(key) for key in list(fields) if key in Caps.__dataclass_fields__}}
        return BackendSpec(role=role, name=name, caps=(Caps(**caps),), **{"factory": "fake.module:Class", **fields})

    return make


@pytest.fixture
def make_model() -> Callable[..., ModelConfig]:
    """Qwen3-0.6B's shape, changed as asked."""

    def make(moe: bool = False, **changes: Any) -> ModelConfig:
        fields: dict[str, Any] = {
            "architecture": "Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM",
            "model_type": "qwen3",
            "vocab_size": 512,
            "hidden_size": 1024,
            "num_layers": 2,
            "num_q_heads": 16,
            "num_kv_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "rms_norm_eps": 1e-6,
            "rope": RopeConfig(theta=1e6, rotary_dim=128),
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
            "moe": MoEConfig(8, 2, 96, norm_topk_prob=True, layers=(0, 1)) if moe else None,
        }
        return ModelConfig(**{**fields, **changes})

    return make


class Everything:
    """An environment in which all requirements are met but those named."""

    def __init__(self, *missing: str) -> None:
        self.missing = missing

    def version(self, distribution: str) -> str | None:
        return None if distribution in self.missing else "1.5"

    def has_module(self, module: str) -> bool:
        return module not in self.missing

    def has_program(self, program: str) -> bool:
        return program not in self.missing


@pytest.fixture
def resolve(world: Any, make_model: Any) -> Any:
    """``resolve(device, missing=(...), prober, model, dtype, **query fields)`` over the plugins of ``world``."""

    def run(
        device: DeviceFacts | None = None,
        missing: Sequence[str] = (),
        prober: Any = None,
        model: ModelConfig | None = None,
        dtype: str = "bfloat16",
        **fields: Any,
    ) -> Plan:
        query = PlanQuery(model or make_model(), device or DeviceFacts("cpu"), dtype, **fields)
        return resolve_plan(query, world.registry(), environment=Everything(*missing), prober=prober)

    return run


@pytest.fixture
def cpu_sim(world: Any, make_spec: Any) -> None:
    """What minisgl-cpu-sim offers."""
    world.plugin(
        "minisgl-cpu-sim",
        make_spec("attention", "cpu", devices=("cpu",), requires=(("exec:c++", "exec:g++"),)),
        make_spec("attention", "torch", stand_in=True),
        make_spec("kv", "torch", stand_in=True),
        make_spec("moe", "torch", stand_in=True),
        make_spec("graph", "emulated", devices=("cpu",), stand_in=True),
    )
