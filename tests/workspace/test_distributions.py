"""The six distributions agree with each other, as installed."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import minisgl_core

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
OPTIONAL = {"flash_attn", "flash_attn_interface", "flashinfer", "llguidance", "transformers", "triton", "xgrammar"}
"""Kernel libraries, which a spec requires and a distribution does not; and what only some folders or plots need."""
AHEAD = {"numpy", "pydantic", "torch"}
"""What a GPU plugin may declare for code that is still to come."""
names = pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)


def _project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def _requirements(name: str) -> dict[str, Requirement]:
    return {r.name: r for r in map(Requirement, distribution(name).requires or ()) if r.marker is None}


def test_the_six_plugins_are_there() -> None:
    assert [folder.name for folder in PLUGINS] == [
        "minisgl_cpu_sim",
        "minisgl_cuda",
        "minisgl_fa",
        "minisgl_flashinfer",
        "minisgl_grammar",
        "minisgl_moe",
    ]


def test_core_version_is_kept_once() -> None:
    assert "version" not in _project(ROOT)
    assert distribution("minisgl-core").version == minisgl_core.__version__


def test_core_runs_on_the_torch_versions_it_is_tested_with() -> None:
    torch = _requirements("minisgl-core")["torch"].specifier
    assert "2.11.0+cu130" in torch
    assert "2.13.0+cpu" in torch
    assert "2.8.0" not in torch


def test_core_entry_points() -> None:
    found = {(e.group, e.name): e.value for e in distribution("minisgl-core").entry_points}
    assert found == {
        ("console_scripts", "minisgl"): "minisgl_core.cli.app:main",
        ("minisgl", "core"): "minisgl_core.builtin.plugin",
    }


@names
def test_plugin_metadata(folder: Path) -> None:
    project = _project(folder)
    installed = distribution(project["name"])
    assert project["name"] == folder.name.replace("_", "-")
    assert installed.version == project["version"]
    assert project["requires-python"] == _project(ROOT)["requires-python"]
    assert (folder / "README.md").read_text().startswith(f"# {project['name']}\n")
    entry_points = {(e.group, e.name): e.value for e in installed.entry_points}
    assert entry_points == {("minisgl", folder.name.removeprefix("minisgl_")): f"{folder.name}.plugin"}


@names
def test_plugin_leaves_later_cores_to_the_role_apis(folder: Path) -> None:
    core = Version(minisgl_core.__version__)
    specifier = _requirements(_project(folder)["name"])["minisgl-core"].specifier
    assert str(core) in specifier
    assert f"{core.major}.{core.minor + 1}.0" in specifier
    assert f"{core.major + 1}.0.0" in specifier


@pytest.mark.parametrize("name", ["minisgl-fa", "minisgl-flashinfer"])
def test_one_pip_install_brings_minisgl_cuda(name: str) -> None:
    assert distribution("minisgl-cuda").version in _requirements(name)["minisgl-cuda"].specifier


def test_all_packages_are_typed() -> None:
    packages = [ROOT / "minisgl_core", *(folder / "src" / folder.name for folder in PLUGINS)]
    assert [p.name for p in packages if not (p / "py.typed").is_file()] == []


def _imports(folder: Path) -> set[str]:
    """Top packages that the sources import, at any depth, the standard library and their own excepted."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {folder.name}


@pytest.mark.parametrize("folder", [ROOT, *PLUGINS], ids=lambda folder: folder.name)
def test_dependencies_are_what_the_sources_import(folder: Path) -> None:
    package = ROOT / "minisgl_core" if folder == ROOT else folder / "src" / folder.name
    name = _project(folder)["name"]
    declared = {requirement.replace("-", "_").lower() for requirement in _requirements(name)}
    if folder == ROOT:
        declared |= {
            Requirement(one).name.replace("-", "_") for one in _project(ROOT)["optional-dependencies"]["serve"]
        }
    assert _imports(package) - OPTIONAL <= declared
    assert declared - {"minisgl_cuda"} <= _imports(package) | (
        AHEAD if "cpu_sim" not in folder.name and folder != ROOT else set()
    )
