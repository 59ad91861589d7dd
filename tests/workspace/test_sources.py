"""No file speaks of the machine it was written on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MACHINE_PATH = re.compile(r"(?<![\w.$}~*-])/(?:home|root|work|mnt|tmp|Users)/\w")
TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".cu", ".cuh", ".h", ".cpp", ".txt", ".sh", ""}


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return [path for name in listed if (path := ROOT / name).is_file() and path.suffix in TEXT]


def test_no_path_of_one_machine() -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _tracked()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert hits == []


def test_the_pattern_matches_what_it_looks_for() -> None:
    assert MACHINE_PATH.search("see /" + "home/someone")
    assert not MACHINE_PATH.search("docs/work/flow and ~/work/flow")
