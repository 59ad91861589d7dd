"""Nothing is called done that is not: a backend whose code is not shipped is refused, and the refusal says so."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest
from packaging.specifiers import SpecifierSet

from minisgl_core.errors import BackendError
from minisgl_core.modelconfig import ModelConfig, MoEConfig, RopeConfig
from minisgl_core.plugin_api import API_VERSIONS, HOOK_OF_ROLE, BackendSpec, Role
from minisgl_core.registry import DeviceFacts, PlanQuery, discover, resolve_plan
from minisgl_core.registry.explain import explain
from minisgl_core.registry.requirements import Installed

PLUGINS = ("minisgl_cpu_sim", "minisgl_cuda", "minisgl_fa", "minisgl_flashinfer", "minisgl_moe")


def _specs(package: str) -> list[BackendSpec]:
    module = import_module(f"{package}.plugin")
    return [spec for hook in HOOK_OF_ROLE.values() if hasattr(module, hook) for spec in getattr(module, hook)()]


@pytest.mark.parametrize("package", PLUGINS)
def test_each_spec_is_filed_under_its_role_and_declares_its_api(package: str) -> None:
    module = import_module(f"{package}.plugin")
    roles = set()
    for role, hook in HOOK_OF_ROLE.items():
        specs = getattr(module, hook)() if hasattr(module, hook) else []
        assert {spec.role for spec in specs} <= {role}
        roles |= {spec.role for spec in specs}
    assert roles, "a plugin that offers nothing"
    assert set(module.MINISGL_PLUGIN.api) == roles
    for role, supported in module.MINISGL_PLUGIN.api.items():
        assert API_VERSIONS[role] in SpecifierSet(supported)


@pytest.mark.parametrize("package", PLUGINS)
def test_a_factory_exists_or_its_module_is_required(package: str) -> None:
    for spec in _specs(package):
        module, _, name = spec.factory.partition(":")
        required = f"import:{module}" in spec.requires
        if find_spec(module) is None:
            assert required, f"{spec.role}:{spec.name} would be offered without code"
        elif not any(item.startswith("import:") for item in spec.requires if isinstance(item, str)):
            assert hasattr(import_module(module), name)


@pytest.mark.parametrize("package", PLUGINS)
def test_names_and_variants_are_unique(package: str) -> None:
    keys = [(spec.role, spec.name, spec.variant) for spec in _specs(package)]
    assert len(keys) == len(set(keys))


class _EverythingElse(Installed):
    """A machine where every kernel library and compiler is installed, with the plugins as they are here."""

    def version(self, distribution: str) -> str:
        return "999"

    def has_module(self, module: str) -> bool:
        return not module.startswith("minisgl_") or super().has_module(module)

    def has_program(self, program: str) -> bool:
        return True


HOPPER = DeviceFacts("cuda", sm=90, name="H200", total_bytes=141 << 30)
CPU = DeviceFacts("cpu")
QWEN3_30B_A3B = ModelConfig(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    num_layers=48,
    num_q_heads=32,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=6144,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6, rotary_dim=128),
    max_position_embeddings=40960,
    tie_word_embeddings=False,
    dtype="bfloat16",
    moe=MoEConfig(num_experts=128, top_k=8, intermediate_size=768, norm_topk_prob=True, layers=tuple(range(48))),
)
STAND_INS = {"attention": "torch", "kv": "torch", "moe": "torch"}
"""What a GPU without kernels must be told to use: stand-ins are never chosen by themselves there."""
UNSHIPPED = sorted(
    {
        (spec.role, f"{spec.name}/{spec.variant}".rstrip("/"), spec.factory.partition(":")[0])
        for package in PLUGINS
        for spec in _specs(package)
        if find_spec(spec.factory.partition(":")[0]) is None
    }
)


@pytest.mark.parametrize("device", [CPU, HOPPER], ids=str)
@pytest.mark.parametrize(("role", "name", "module"), UNSHIPPED)
def test_an_unshipped_backend_is_refused_by_name(role: Role, name: str, module: str, device: DeviceFacts) -> None:
    query = PlanQuery(QWEN3_30B_A3B, device, "bfloat16", graph=role == "graph", backends={**STAND_INS, role: name})
    with pytest.raises(BackendError) as refused:
        resolve_plan(query, environment=_EverythingElse(), prober=lambda requests: {})
    assert f"no module {module}" in str(refused.value)


def test_explain_promises_no_unshipped_backend_for_a_machine_elsewhere() -> None:
    query = PlanQuery(QWEN3_30B_A3B, HOPPER, "bfloat16", graph=True)
    answer = explain(query, discover(), elsewhere=True)
    unshipped = {(role, name) for role, name, _ in UNSHIPPED}
    promised = {
        candidate.backend
        for slot in answer.slots
        for candidate in slot.candidates
        if candidate.status in ("chosen", "fits") and (slot.slot.role, candidate.backend.partition("@")[0]) in unshipped
    }
    assert promised == set()


@pytest.mark.parametrize("device", [CPU, HOPPER], ids=str)
def test_auto_never_chooses_an_unshipped_backend(device: DeviceFacts) -> None:
    query = PlanQuery(QWEN3_30B_A3B, device, "bfloat16", backends=STAND_INS if device is HOPPER else {})
    plan = resolve_plan(query, environment=_EverythingElse(), prober=lambda requests: {})
    chosen = {bucket.choice.factory.partition(":")[0] for bucket in plan.buckets}
    assert chosen.isdisjoint(module for _, _, module in UNSHIPPED)


def test_discovery_of_our_plugins_imports_nothing_heavy() -> None:
    script = (
        f"import importlib, sys\nfor name in {PLUGINS!r}:\n    importlib.import_module(name + '.plugin')\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'triton', 'flashinfer', 'flash_attn', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
