"""The documentation says what the code says."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from minisgl_core.plugin_api import HOOK_OF_ROLE, BackendSpec, hooks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HOOKS = sorted(name for name in vars(hooks) if name.startswith("minisgl_"))


def test_every_role_has_a_hook() -> None:
    assert set(HOOKS) == {*HOOK_OF_ROLE.values(), "minisgl_plan_resolved"}


@pytest.mark.parametrize("name", HOOKS)
def test_each_hook_is_documented_with_its_arguments(name: str) -> None:
    signature = str(inspect.signature(getattr(hooks, name))).replace("'", "")
    assert f"`{name}{signature}`" in (DOCS / "plugins.md").read_text()


def test_no_hook_is_documented_that_does_not_exist() -> None:
    text = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    assert set(re.findall(r"\bminisgl_[a-z_]+(?=\()", text)) <= set(HOOKS)


def test_every_field_of_a_spec_is_documented() -> None:
    table = (DOCS / "plugins.md").read_text().split("## What a spec says")[1].split("\n\n")[1]
    documented = {name for row in table.splitlines() for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert documented == {field.name for field in fields(BackendSpec)} - {"summary"}


def test_the_example_of_a_plugin_is_a_plugin() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "plugins.md").read_text(), re.DOTALL)
    module: dict = {}
    exec(compile(code, "plugins.md", "exec"), module)
    (spec,) = module["minisgl_attention_backends"]()
    assert module["MINISGL_PLUGIN"].name == spec.name == "mine"


def test_every_package_is_described() -> None:
    text = (DOCS / "architecture.md").read_text()
    packages = {
        path.stem
        for path in (ROOT / "minisgl_core").iterdir()
        if not path.name.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    described = {
        name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert packages <= described


def test_every_decision_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = sorted(path.name for path in (DOCS / "decisions").glob("[0-9]*.md"))
    assert pages
    assert [page for page in pages if f"decisions/{page}" not in navigation] == []
    assert [int(page[:4]) for page in pages] == list(range(1, len(pages) + 1))
