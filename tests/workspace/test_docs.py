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


TERMS = (
    *("request", "`PendingReq`", "`Req`", "`Batch`", "phase", "prefill", "decode"),
    *("`cached_len`", "`device_len`", "`extend_len`", "page", "slot", "`page_table`", "`out_loc`"),
    *("`KVCachePool`", "`PrefixCache`", "`CacheManager`", "`CacheHandle`", "`prepare_metadata`"),
    *("role", "backend", "plugin", "hook", "plan", "`_host`, `_device`"),
    "schedule, prepare, forward, sample, process",
)
"""The vocabulary that the design fixes."""


def test_the_glossary_defines_every_term_of_the_design_once() -> None:
    used = (DOCS / "glossary.md").read_text().split("## Retired words")[0]
    defined = re.findall(r"^\| ([^|]+) \|", used, re.MULTILINE)
    assert [term for term in TERMS if defined.count(term) != 1] == []
    words = [word for row in defined if row not in ("word", "---") for word in row.split(", ")]
    assert len(words) == len(set(words)), "a word has two meanings"


def test_the_glossary_lists_the_shapes() -> None:
    shapes = (DOCS / "glossary.md").read_text().split("## Shapes in docstrings")[1].split("##")[0]
    assert set(re.findall(r"\b([A-Z]) [a-z]", shapes)) >= set("TBHKDPSEI")


LONG_LINES = {"gpu-check.md"}
"""Pages that are not wrapped yet."""


def test_prose_wraps_at_120() -> None:
    written = [page for page in DOCS.rglob("*.md") if page.name not in LONG_LINES]
    pages = [ROOT / "README.md", *written, *ROOT.glob("plugins/*/README.md")]
    assert [
        f"{page.relative_to(ROOT)}:{number}"
        for page in pages
        for number, line in _prose(page.read_text())
        if len(line) > 120
    ] == []


def _prose(text: str) -> list[tuple[int, str]]:
    """Numbered lines outside tables, code blocks and links that cannot be broken."""
    found, code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if not code and not line.startswith(("|", "#", "    ")) and " " in line.strip():
            found.append((number, line))
    return found
