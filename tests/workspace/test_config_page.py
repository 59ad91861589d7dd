"""docs/configuration.md names every setting, and none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import config_page
import marked
import pytest
from pydantic import BaseModel, Field

from minisgl_core.env import ENV
from minisgl_core.errors import ConfigError
from minisgl_core.llm.arguments import SETTINGS
from minisgl_core.settings.load import load_settings
from minisgl_core.settings.schema import SECTIONS

ROOT = config_page.PAGE.parents[1]
TEXT = config_page.PAGE.read_text(encoding="utf-8")
VARIABLES = set(re.findall(r"\bMINISGL_[A-Z_]+\b", TEXT))


def _known(variable: str) -> bool:
    try:
        load_settings(environ={variable: ""})
    except ConfigError as error:
        if error.field != variable:
            raise
        return False
    return True


def _chapter(title: str) -> str:
    return TEXT.split(f"\n## `{title}`\n")[1].split("\n## ")[0]


def test_the_tables_are_those_of_the_program() -> None:
    assert marked.rewritten(TEXT, config_page.parts()) == TEXT, (
        "run `make config-page` and commit docs/configuration.md"
    )


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_its_row(section: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \|", _chapter(f"[{section}]"), re.MULTILINE)
    assert rows == list(SECTIONS[section].model_fields)


def test_every_variable_is_one_that_the_program_accepts() -> None:
    assert {name for name in VARIABLES if not _known(name)} == set()


def test_every_variable_is_named() -> None:
    """Found by asking the program about its sources' own words, not by the list that the tables are made from."""
    sources = [*ROOT.glob("minisgl_core/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py"), ROOT / "README.md"]
    spelt = {name for path in sources for name in re.findall(r"\bMINISGL_[A-Z_]+\b", path.read_text(encoding="utf-8"))}
    derived = {f"MINISGL_{key.upper()}" for model in SECTIONS.values() for key in model.model_fields if key != "path"}
    wanted = {name for name in spelt if _known(name)} | derived | {"MINISGL_MODEL"}
    assert {item.name for item in ENV.all()} <= wanted
    assert wanted - VARIABLES == set()


def test_python_programs_can_say_the_same() -> None:
    keys = {key for section in ("engine", "debug") for key in SECTIONS[section].model_fields} - {"tp_size"}
    tables = {"backends", "backend_options", "shadow", "allow_plugins", "deny_plugins"}
    assert keys | tables <= SETTINGS


def test_the_example_is_a_config(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml.*?\n(.*?)```", TEXT, re.DOTALL)
    path = tmp_path / "minisgl.toml"
    path.write_text(example)
    settings = load_settings(path, environ={})
    assert settings.engine.page_size == 16 and settings.deny == ("minisgl-flashinfer",)
    assert set(settings.backends) == {"attention", "linear"} and set(settings.options) == {"attention:fa"}


def test_a_setting_that_is_new_or_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class More(SECTIONS["server"]):  # type: ignore[name-defined, misc]
        workers: int = Field(default=1, description="how many")

    class Fewer(BaseModel):
        host: str = ""

    for changed in (More, Fewer):
        monkeypatch.setitem(SECTIONS, "server", changed)
        assert marked.rewritten(TEXT, config_page.parts()) != TEXT


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="one part between <!-- begin engine -->"):
        marked.rewritten(TEXT.replace("<!-- begin engine -->", ""), config_page.parts())


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 9}, "whole number from 1 up to 9"),
        ({"type": "number", "exclusiveMinimum": 0}, "number above 0"),
        ({"anyOf": [{"type": "integer"}, {"const": "auto", "type": "string"}]}, 'whole number or `"auto"`'),
        ({"anyOf": [{"enum": [1, 2, 4], "type": "integer"}, {"type": "null"}]}, "`1`, `2` or `4`"),
        ({"items": {"enum": ["a", "b"], "type": "string"}, "type": "array"}, 'list of `"a"` or `"b"`'),
        ({"format": "directory-path", "type": "string"}, "a folder"),
    ],
)
def test_types_in_words(schema: dict[str, object], text: str) -> None:
    assert config_page.type_text(schema) == text
