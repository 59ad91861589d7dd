"""The commands of the README work."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [line for block in _blocks("console") for line in block.splitlines()]
MINISGL = [line for line in COMMANDS if line.startswith("minisgl ")]
MINISGL_PROGRAM = str(Path(sys.executable).with_name("minisgl"))
CONFIG = _blocks("toml")[0]
AFTER_MAKE_RUN = """
import importlib.metadata as metadata, sys
found = metadata.distributions
def hidden(distribution):
    entries = distribution.read_text("entry_points.txt") or ""
    return "[minisgl]" in entries and distribution.name not in ("minisgl-core", "minisgl-cpu-sim")
metadata.distributions = lambda **given: [item for item in found(**given) if not hidden(item)]
from minisgl_core.cli.app import main
sys.exit(main())
"""
"""The program where of all plugins only those that `make run` installs are there."""


def _run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MINISGL_NUM_PAGE_OVERRIDE": "512"},
        check=False,
    )


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Path]) -> str:
    return str(tiny("q3-text"))


def test_every_make_target_is_in_the_help() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    targets = {line.split()[1] for line in COMMANDS if line.startswith("make ")}
    assert {"run", "test"} <= targets
    assert targets <= set(re.findall(r"^  make ([a-z-]+)", listed, re.MULTILINE))


def test_nothing_else_is_typed() -> None:
    assert [line for line in COMMANDS if not line.startswith(("make ", "minisgl ", "pip "))] == []


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("pip ")])
def test_case_125_what_pip_is_to_install_is_found_among_the_wheels(line: str, tmp_path: Path) -> None:
    """In a new environment, without an index: `.ci/run` does the same with all dependencies."""
    dist = tmp_path / "dist"
    dist.mkdir()
    for folder in (ROOT, *(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))):
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist)]
        subprocess.run(build, cwd=folder, check=True, capture_output=True)
    words = [*shlex.split(line)[1:], "--no-index", "--no-deps", "--dry-run", "--ignore-installed"]
    done = _run([sys.executable, "-m", "pip", *words], tmp_path)
    assert done.returncode == 0 and f"Would install {words[3]}" in done.stdout, done.stderr


@pytest.mark.parametrize("line", MINISGL)
def test_each_command_runs(line: str, model: str, tmp_path: Path) -> None:
    words = shlex.split(line)[1:]
    words = [model if word == "PATH" else word for word in words]
    (tmp_path / "requests.jsonl").write_text(_blocks("json")[0])
    if words[0] == "generate" and "--model" not in words:
        words += ["--model", model, "--max-tokens", "4"]
    done = _run([MINISGL_PROGRAM, *words], tmp_path)
    nothing_runs_there = 1 if "--device" in words else 0  # an answer too, for hardware that is not here
    assert done.returncode in (0, nothing_runs_there), done.stderr
    assert done.stdout.strip() or words[0] == "chat" or "--output" in words
    if "--output" in words:
        assert (tmp_path / "answers.jsonl").read_text().count("\n") == 2


def test_the_config_file_is_accepted_and_its_backends_are_found(model: str, tmp_path: Path) -> None:
    """In the environment of `make run`: what else is installed here is hidden."""
    (tmp_path / "minisgl.toml").write_text(CONFIG.replace("path/to/model", model))
    done = _run([sys.executable, "-c", AFTER_MAKE_RUN, "explain"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "page_size=16" in done.stdout


def test_hardware_elsewhere_after_make_run_names_what_to_install(tmp_path: Path) -> None:
    (line,) = [line for line in MINISGL if "--device" in line]
    done = _run([sys.executable, "-c", AFTER_MAKE_RUN, *shlex.split(line)[1:]], tmp_path)
    assert done.returncode == 1, done.stderr
    assert "no plan. no plugin for cuda is installed: pip install minisgl-cuda minisgl-flashinfer" in done.stdout


def test_the_python_example_runs(model: str, tmp_path: Path) -> None:
    (code,) = _blocks("python")
    script = tmp_path / "example.py"
    script.write_text(code.replace('"path/to/model"', f"{model!r}, num_page_override=512"))
    done = _run([sys.executable, str(script)], tmp_path)
    assert done.returncode == 0, done.stderr
