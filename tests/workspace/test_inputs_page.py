"""docs/reference/inputs.md says what the gates do."""

from __future__ import annotations

import re
import sys

import inputs_page
import marked
import pytest

from minisgl_core.inputs import Gate, used

TEXT = inputs_page.PAGE.read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_program() -> None:
    assert marked.rewritten(TEXT, inputs_page.parts()) == TEXT, "run `make config-page` and commit the page"


@pytest.mark.parametrize("name", inputs_page.GATES)
def test_every_key_has_its_row(name: str) -> None:
    part = TEXT.split(f"<!-- begin {name} -->")[1].split("<!-- end")[0]
    cells = [line.split(" | ")[0] for line in part.splitlines() if line.startswith("| `")]
    keys = [key for cell in cells for key in re.findall(r"`([^`]+)`", cell)]
    assert sorted(keys) == sorted(inputs_page.GATES[name].rules)


def test_every_gate_of_the_program_is_on_the_page() -> None:
    """Found by the sources' own words."""
    root = inputs_page.PAGE.parents[2] / "minisgl_core"
    spelt = {
        name for path in root.rglob("*.py") for name in re.findall(r"^(\w+): Final = Gate\(", path.read_text(), re.M)
    }
    assert len(spelt) >= 8
    assert {gate.title for gate in inputs_page.GATES.values()} == {
        gate.title for name in spelt for gate in _gates(name)
    }


def _gates(name: str) -> list[Gate]:
    modules = [module for key, module in sys.modules.items() if key.startswith("minisgl_core.")]
    return [vars(module)[name] for module in modules if isinstance(vars(module).get(name), Gate)]


def test_a_key_that_is_new_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    more = Gate("config.json", {**inputs_page.GATES["config"].rules, "new": used("something")})
    monkeypatch.setitem(inputs_page.GATES, "config", more)
    assert marked.rewritten(TEXT, inputs_page.parts()) != TEXT
    monkeypatch.delitem(inputs_page._SAMPLING, "seed")
    with pytest.raises(ValueError, match="disagree about sampling parameter seed"):
        inputs_page.parts()
