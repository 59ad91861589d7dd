"""Distributions built and installed in addition to ours, without a network, and commands run there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROGRAM = str(Path(sys.executable).with_name("minisgl"))
SMALL = ("--dtype", "float32", "--num-page-override", "256", "--max-seq-len-override", "128", "--ignore-eos")


@dataclass(frozen=True)
class Site:
    """A folder of installed packages that comes before our own on Python's path."""

    packages: Path
    work: Path
    sources: tuple[Path, ...] = ()
    """Source folders of development installs: ``pip install --target`` writes a .pth that only a real site reads."""

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program in an empty folder; ``minisgl`` and ``python`` are this environment's."""
        words = [{"minisgl": PROGRAM, "python": sys.executable}.get(arguments[0], arguments[0]), *arguments[1:]]
        ours = {name: value for name, value in os.environ.items() if not name.startswith("MINISGL_")}
        done = subprocess.run(
            words,
            cwd=self.work,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            stdin=subprocess.DEVNULL,
            env={
                **ours,
                "PYTHONPATH": os.pathsep.join(map(str, (*self.sources, self.packages))),
                "PIP_NO_INDEX": "1",
                "OMP_NUM_THREADS": "1",
            },
        )
        assert not check or done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    def install(self, source: Path) -> Path:
        """Build the wheel of a source folder, as pip would from its sources, and install it; returns the wheel."""
        wheels = self.work / "wheels"
        pip = ("python", "-m", "pip", "--disable-pip-version-check", "-q")
        self.run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source))
        (wheel,) = wheels.glob("*.whl")
        self.run(*pip, "install", "--no-deps", "--target", str(self.packages), str(wheel))
        return wheel

    def tokens(self, model: Path, prompt: list[int], count: int, *flags: str) -> tuple[list[int], dict[str, Any]]:
        """(token ids that ``minisgl generate`` prints, its plan)"""
        ids = ",".join(map(str, prompt))
        asked = ("--model", str(model), "--prompt-ids", ids, "--max-tokens", str(count), "--json", "--plan")
        data = json.loads(self.run("minisgl", "generate", *asked, *SMALL, *flags).stdout)
        return data["token_ids"], data["plan"]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    work = tmp_path / "work"
    work.mkdir()
    return Site(tmp_path / "site", work)


@pytest.fixture
def same_tokens(
    site: Site, tiny: Callable[[str], Path], answers: Callable[[str], Any]
) -> Callable[[str, str, str], None]:
    """``same_tokens(role, name, flags)``: a generation with the backend gives what transformers gives, and the plan
    says that the backend made it. Our own backends are tested against the same answers.
    """

    def check(role: str, name: str, flags: str) -> None:
        model = "moe" if role == "moe" else "s93"
        wanted = answers(model)
        tokens, plan = site.tokens(tiny(model), wanted.prompts[1], 6, "--temperature", "0", *flags.split())
        assert tokens == wanted.continuations[1][:6]
        chosen = {bucket["choice"]["name"] for bucket in plan["buckets"] if bucket["role"] == role}
        assert name in chosen

    return check
