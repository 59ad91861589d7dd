"""docs/contributing.md names files that exist, and counts them right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "contributing.md").read_text()
SECTIONS = dict(part.split("\n", 1) for part in TEXT.split("\n## ")[1:])
FOLDERS = ("minisgl_core/", "plugins/", "tests/", "docs/")


def test_the_page_has_the_five_kinds_of_change_and_the_menu_has_the_page() -> None:
    assert list(SECTIONS) == ["A model", "A sampling option", "An operation", "A scheduler policy", "A role"]
    assert "contributing.md" in (ROOT / "mkdocs.yml").read_text()


def test_every_named_file_exists() -> None:
    named = [name for name in re.findall(r"`([\w./-]+)`", TEXT) if name.startswith(FOLDERS)]
    assert len(named) > 25
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("section", SECTIONS)
def test_the_number_of_source_files_is_that_of_the_table(section: str) -> None:
    text = SECTIONS[section]
    (claimed,) = re.findall(r"\*\*(\d+) source files\*\*", text)
    files = re.findall(r"^\| `([\w./]+)`", text, re.MULTILINE)
    assert len(set(files)) == len(files) == int(claimed)


def test_a_sampling_option_takes_at_most_four_files() -> None:
    assert "**4 source files**" in SECTIONS["A sampling option"]
