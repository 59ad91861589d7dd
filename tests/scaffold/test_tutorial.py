"""docs/write-a-backend.md, done: every block of code is put where it says, every command is run, in the page's order.

What comes out is examples/custom_backend, file by file.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("minisgl_cpu_sim")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "write-a-backend.md").read_text()
EXAMPLE = ROOT / "examples" / "custom_backend"
PROJECT = "minisgl_blocked"
FAILING = "minisgl verify attention:blocked --check softcap"
SHORTER = {
    f"pytest {PROJECT}": ("-k", "contract or float32 and ragged"),
    "minisgl verify attention:blocked": ("--check", "ragged"),
}
"""The long commands are run on a part of the checks here; `make test-all` runs all of them on the example."""


@dataclass(frozen=True)
class Block:
    """One fenced block. ``title``: the file it belongs to."""

    language: str
    title: str
    text: str


def blocks() -> Iterator[Block]:
    for match in re.finditer(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE):
        yield Block(match[1], match[2] or "", match[3])


def apply_diff(text: str, diff: str) -> str:
    """Replace the lines marked ``-`` and `` `` by those marked ``+`` and `` ``."""
    lines = diff.splitlines()
    old = "".join(line[1:] + "\n" for line in lines if line[0] in " -")
    new = "".join(line[1:] + "\n" for line in lines if line[0] in " +")
    assert text.count(old) == 1, f"{old!r} is not there once"
    return text.replace(old, new)


def apply_python(text: str, code: str) -> str:
    """Imports take the place of the file's imports, methods that of the methods of their name; a new class is added."""
    given = ast.parse(code).body
    classes = [node for node in given if isinstance(node, ast.ClassDef)]
    imports = [node for node in given if isinstance(node, ast.Import | ast.ImportFrom)]
    known = {node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    if any(node.name not in known for node in classes):
        return f"{text}\n\n{code}"
    for owner in classes:
        for method in owner.body:
            assert isinstance(method, ast.FunctionDef)
            old = _method(text, owner.name, method.name)
            text = _replaced(text, old, old, "".join(_lines(code, method, method)))
    if imports:
        before = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
        text = _replaced(text, before[0], before[-1], "".join(_lines(code, imports[0], imports[-1])))
    return text


def _method(text: str, owner: str, name: str) -> ast.FunctionDef:
    (found,) = [
        method
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == owner
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == name
    ]
    return found


def _lines(text: str, first: ast.stmt, last: ast.stmt) -> list[str]:
    return text.splitlines(keepends=True)[first.lineno - 1 : last.end_lineno]


def _replaced(text: str, first: ast.stmt, last: ast.stmt, new: str) -> str:
    lines = text.splitlines(keepends=True)
    lines[first.lineno - 1 : last.end_lineno] = [new]
    return "".join(lines)


class Reader:
    """Follows the page literally, in a folder that contains the distribution's."""

    def __init__(self, site: Any, model: Path) -> None:
        self.site, self.model, self.output = site, model, ""

    def follow(self, block: Block) -> None:
        if block.language == "console":
            self.output = "".join(self.type(line) for line in block.text.splitlines())
        elif block.language == "text":
            output = " ".join(self.output.split())
            for line in block.text.splitlines():
                assert line in output, f"{line!r} is not in {output[-2000:]}"
        elif block.title == "minisgl.toml":
            (self.site.work / block.title).write_text(block.text)
        else:
            self.edit(self.site.work / PROJECT / block.title, block)

    def edit(self, file: Path, block: Block) -> None:
        if not file.exists():
            file.write_text(block.text)
            return
        change = {"diff": apply_diff, "python": apply_python}[block.language]
        file.write_text(change(file.read_text(), block.text))

    def type(self, line: str) -> str:
        words = [str(self.model) if word == "PATH" else word for word in shlex.split(line)]
        words += SHORTER.get(line, ())
        if words[0] == "pip":
            assert words[-2:] == ["-e", PROJECT]
            words = ["python", "-m", *words[:-2], "-q", "--upgrade", "--no-deps", "--target", str(self.site.packages)]
            words += ["--no-build-isolation", "-e", PROJECT]  # no index here: hatchling is installed already
            self.site = replace(self.site, sources=(self.site.work / PROJECT / "src",))
        elif words[0] == "pytest":
            words = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *words[1:]]
        elif words[1] == "generate":
            words += ["--num-page-override", "512", "--max-seq-len-override", "256"]
        done = self.site.run(*words, check=line != FAILING)
        assert line != FAILING or done.returncode == 1
        return str(done.stdout)


@pytest.mark.slow
def test_the_page_leads_to_the_example_and_all_its_commands_run(site: Any, tiny: Callable[[str], Path]) -> None:
    reader = Reader(site, tiny("q3-text"))
    for block in blocks():
        reader.follow(block)
    made = reader.site.work / PROJECT
    assert _files(made) == _files(EXAMPLE)


def _files(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.suffix in (".py", ".md", ".toml")]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def test_every_block_is_of_a_kind_that_is_followed() -> None:
    kinds = {(block.language, bool(block.title)) for block in blocks()}
    assert kinds == {("console", False), ("text", False), ("python", True), ("diff", True), ("toml", True)}
    assert PAGE.count("```") == 2 * len(list(blocks()))
    typed = [line for block in blocks() if block.language == "console" for line in block.text.splitlines()]
    assert set(SHORTER) | {FAILING} <= set(typed)
    commands = {shlex.split(line)[1] for line in typed if line.startswith("minisgl ")}
    assert commands >= {"new-plugin", "verify", "generate", "explain", "plugins", "doctor"}


def test_the_example_is_about_60_lines() -> None:
    assert len((EXAMPLE / "src/minisgl_blocked/attention.py").read_text().splitlines()) <= 64


@pytest.mark.slow
def test_the_example_passes_the_whole_kit(site: Any) -> None:
    site.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE))


@pytest.mark.parametrize(
    ("text", "code", "result"),
    [
        (
            "import a\n\n\nclass C:\n    def f(self):\n        return 1\n",
            "import b\n\n\nclass C:\n    def f(self):\n        return 2\n",
            "import b\n\n\nclass C:\n    def f(self):\n        return 2\n",
        ),
        ("x = 1\n", "class D:\n    y = 2\n", "x = 1\n\n\nclass D:\n    y = 2\n"),
    ],
)
def test_code_is_put_in_the_place_of_what_has_its_name(text: str, code: str, result: str) -> None:
    assert apply_python(text, code) == result
