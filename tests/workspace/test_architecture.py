"""The architecture's own settings are complete, and what import-linter cannot see holds too."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
_SIDES = ("source_modules", "forbidden_modules")
PLUGIN_SOURCES = sorted(ROOT.glob("plugins/*/src/**/*.py"))


def _contract(name: str) -> dict:
    (found,) = [c for c in SETTINGS["importlinter"]["contracts"] if c["name"] == name]
    return found


def test_plugins_may_import_the_plugin_api_and_no_other_package() -> None:
    packages = {
        path.stem
        for path in (ROOT / "minisgl_core").iterdir()
        if not path.name.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    forbidden = _contract("Plugins import only minisgl_core.plugin_api")["forbidden_modules"]
    assert {name.removeprefix("minisgl_core.") for name in forbidden} == packages - {"plugin_api"}


def test_the_serving_path_may_import_no_tooling() -> None:
    contract = _contract("The serving path knows no tooling")
    serving, tooling = ({name.removeprefix("minisgl_core.") for name in contract[key]} for key in _SIDES)
    assert contract["type"] == "forbidden" and "allow_indirect_imports" not in contract
    assert serving == {"engine", "layers", "models", "registry", "scheduler"}
    assert tooling == {"bench", "calibrate", "capsule", "doctor", "scaffold", "testing"}


def test_every_package_is_linted() -> None:
    packages = {"minisgl_core", *(path.name for path in ROOT.glob("plugins/minisgl_*"))}
    assert set(SETTINGS["importlinter"]["root_packages"]) == packages
    assert set(SETTINGS["mypy"]["packages"]) == packages


def _uses_torch_cuda(tree: ast.AST) -> list[int]:
    """Lines that reach ``torch.cuda``, by attribute or by import."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            hit = isinstance(node.value, ast.Name) and node.value.id == "torch"
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            hit = module.startswith("torch.cuda") or (module == "torch" and any(a.name == "cuda" for a in node.names))
        elif isinstance(node, ast.Import):
            hit = any(alias.name.startswith("torch.cuda") for alias in node.names)
        else:
            continue
        if hit:
            lines.append(node.lineno)
    return lines


def test_plugins_reach_streams_and_events_only_through_the_platform() -> None:
    assert PLUGIN_SOURCES
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in PLUGIN_SOURCES
        for line in _uses_torch_cuda(ast.parse(path.read_text()))
    }
    assert found == set()


def test_the_search_for_torch_cuda_finds_each_spelling() -> None:
    source = (
        "import torch\nimport torch.cuda\nfrom torch import cuda\nfrom torch.cuda import Stream\ntorch.cuda.Event()\n"
    )
    assert sorted(_uses_torch_cuda(ast.parse(source))) == [2, 3, 4, 5]
