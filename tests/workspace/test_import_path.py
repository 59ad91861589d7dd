"""Tests, tools and benchmarks share modules through pytest's ``pythonpath``; none edits ``sys.path``."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests", "tools", "benchmarks", "plugins")
EDIT = re.compile(r"sys\.path(\[.*\]\s*=(?!=)|\.(insert|append|extend)\()")


def test_nothing_edits_the_import_path() -> None:
    sources = {path: path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    del sources[Path(__file__).resolve()]
    assert [str(path.relative_to(ROOT)) for path, text in sources.items() if EDIT.search(text)] == []


def test_edits_are_recognised() -> None:
    edits = ("sys.path.insert(0, x)", "sys.path[:0] = [x]", "sys.path.append(x)", "sys.path[0] = x")
    assert all(EDIT.search(line) for line in edits)
    assert not EDIT.search("entries = [p for p in sys.path if sys.path[0] == p]")
