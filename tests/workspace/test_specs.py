"""What our plugins offer is shipped: each spec has its code, its role and its API."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest
from packaging.specifiers import SpecifierSet

from minisgl_core.plugin_api import API_VERSIONS, HOOK_OF_ROLE, BackendSpec

PLUGINS = ("minisgl_cpu_sim", "minisgl_cuda", "minisgl_fa", "minisgl_flashinfer", "minisgl_grammar", "minisgl_moe")


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
def test_each_factory_exists(package: str) -> None:
    """A module that needs a library which is not here is named by the spec's requirements."""
    for spec in _specs(package):
        module, _, name = spec.factory.partition(":")
        assert find_spec(module) is not None, f"{spec.role}:{spec.name} would be offered without code"
        if not any(item.startswith("import:") for item in spec.requires if isinstance(item, str)):
            assert hasattr(import_module(module), name)


@pytest.mark.parametrize("package", PLUGINS)
def test_names_and_variants_are_unique(package: str) -> None:
    keys = [(spec.role, spec.name, spec.variant) for spec in _specs(package)]
    assert len(keys) == len(set(keys))


def test_discovery_of_our_plugins_imports_nothing_heavy() -> None:
    script = (
        f"import importlib, sys\nfor name in {PLUGINS!r}:\n    importlib.import_module(name + '.plugin')\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'triton', 'flashinfer', 'flash_attn', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
