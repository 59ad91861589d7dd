"""What pip installs is the whole package: each wheel holds every file of its source folder, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    ".": "minisgl_core",
    **{str(p.relative_to(ROOT)): f"src/{p.name}" for p in sorted(ROOT.glob("plugins/minisgl_*"))},
}


def _source_files(folder: Path, package: str) -> set[str]:
    root = folder / package
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "."],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return {f"{root.name}/{name}" for name in listed if (root / name).exists()}


@pytest.mark.parametrize("where", PACKAGES)
def test_wheel_holds_every_file(where: str, tmp_path: Path) -> None:
    folder = ROOT / where
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = {name.split("/", 1)[1] for name in archive.namelist() if ".dist-info/" in name}
    expected = _source_files(folder, PACKAGES[where])
    assert expected, "the source folder is empty: this test would pass on nothing"
    assert inside == expected
    assert {"METADATA", "entry_points.txt"} <= metadata
