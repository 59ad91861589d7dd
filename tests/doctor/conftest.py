"""Broken plugins, installed for one test, and commands in this process."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_core.cli.app import main

BROKEN = Path(__file__).resolve().parents[1] / "fixtures" / "broken_plugins"


def write_metadata(
    site: Path,
    name: str,
    module: str,
    *,
    version: str = "1.0",
    requires: Sequence[str] = (),
    editable: Path | None = None,
) -> Path:
    """The ``.dist-info`` folder that pip would write for a plugin."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {item}" for item in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "entry_points.txt").write_text(f"[minisgl]\nmain = {module}\n")
    if editable is not None:
        url = {"url": editable.as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(url))
    return info


def ours() -> list[str]:
    """The distributions of this project's plugins that are installed."""
    found = {entry.dist.name for entry in entry_points(group="minisgl") if entry.dist is not None}
    return sorted(name for name in found if name.startswith("minisgl-") and name != "minisgl-core")


@dataclass(frozen=True)
class Commands:
    """``minisgl`` in this process."""

    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)"""
        self.capsys.readouterr()
        code = main(list(arguments))
        captured = self.capsys.readouterr()
        return code, captured.out, captured.err

    def deny(self, *distributions: str) -> None:
        """Load all plugins but these."""
        self.monkeypatch.setenv("MINISGL_PLUGINS_DENY", ",".join(distributions))

    def diagnose(self, *arguments: str, also: Sequence[str] = ()) -> tuple[int, list[dict[str, str]], dict[str, Any]]:
        """(exit code, findings, all of it) of ``minisgl doctor``; of our plugins only those named are examined."""
        self.deny(*(name for name in ours() if name not in also))
        code, out, _ = self.run("doctor", "--json", "--device", "cpu", *arguments)
        data = json.loads(out)
        return code, data["findings"], data


@pytest.fixture
def commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_settings: None, own_cache: Path
) -> Commands:
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(own_cache))
    torch.set_num_threads(1)
    return Commands(capsys, monkeypatch)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of installed packages; what is imported from it is forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(torch.cuda, "_initialized", torch.cuda._initialized)  # one of the plugins changes it
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith("broken_"):
            del sys.modules[name]


@pytest.fixture
def break_with(site: Path) -> Callable[..., str]:
    """``break_with("hook_raises")`` installs that broken plugin; returns its distribution's name."""

    def install(case: str, **metadata: Any) -> str:
        for path in (BROKEN / "broken_common.py", *(BROKEN / case).glob("*.py")):
            shutil.copy(path, site)
        name = f"broken-{case.replace('_', '-')}"
        write_metadata(site, name, f"broken_{case}", **metadata)
        return name

    return install
