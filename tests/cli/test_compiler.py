"""The program on a machine whose C++ compiler is missing, broken, or named wrongly, and where the cache is read-only.

In a process of its own each time: a process that has loaded the kernels asks no compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl_core.env import ENV

pytest.importorskip("minisgl_cpu_sim")

Tiny = Callable[[str], Path]
PROGRAM = str(Path(sys.executable).with_name("minisgl"))
SLOW = "attention, kv: torch@minisgl-cpu-sim is slow, and only used because cpu@minisgl-cpu-sim cannot run here ("


@pytest.fixture
def generate(tiny: Tiny, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``generate("--backend", "kv=cpu", CXX="g++")``: an answer of two tokens with an empty cache, or not."""

    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        call = [PROGRAM, "generate", "--model", str(tiny("q3")), "--prompt-ids", "1,2", "--max-tokens", "2"]
        own = {"MINISGL_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path), "CXX": "", **environ}
        small = ["--num-page-override", "64", "--max-seq-len-override", "48"]
        return subprocess.run(
            [*call, *arguments, *small], capture_output=True, text=True, check=False, env={**os.environ, **own}
        )

    return run


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """A PATH on which g++ fails."""
    program = tmp_path / "bin" / "g++"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}


def test_a_broken_compiler_means_slow_stand_ins_and_one_line_that_says_so(
    generate: Callable[..., subprocess.CompletedProcess[str]], broken: dict[str, str]
) -> None:
    done = generate(**broken)
    assert done.returncode == 0 and len(done.stdout.split()) == 2
    warning, plan, _ = done.stderr.splitlines()
    assert warning.startswith(SLOW) and "g++ failed: exit code 1" in warning and "install g++ 10 or newer" in warning
    assert "attention=torch@minisgl-cpu-sim, kv=torch@minisgl-cpu-sim" in plan


def test_a_named_backend_is_not_replaced(
    generate: Callable[..., subprocess.CompletedProcess[str]], broken: dict[str, str]
) -> None:
    done = generate("--backend", "kv=cpu", **broken)
    first, *details = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(details)) == (1, "", 2)
    assert first.startswith("error: you named cpu for kv; ") and "g++ failed: exit code 1" in details[1]


def test_no_compiler_at_all(generate: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    done = generate(PATH=str(tmp_path))
    assert done.returncode == 0
    assert done.stderr.startswith(f"{SLOW}C++ compiler: wanted g++ or c++ or clang++, supported none on PATH")


def test_a_wrong_cxx_is_an_error(generate: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = generate(CXX="/nope/g++")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: CXX is '/nope/g++', which is no program that can be run; set it to a C++ compiler, or unset it\n"
    )


def test_kernels_that_are_compiled_already_need_no_compiler(
    generate: Callable[..., subprocess.CompletedProcess[str]], broken: dict[str, str], tmp_path: Path
) -> None:
    usual = {"MINISGL_CACHE_DIR": str(ENV.CACHE_DIR.value)}
    assert generate(**usual).returncode == 0  # compiles them at the latest now
    for path in (broken["PATH"], str(tmp_path)):
        done = generate(**usual, PATH=path)
        (plan, _) = done.stderr.splitlines()
        assert "attention=cpu@minisgl-cpu-sim, kv=cpu@minisgl-cpu-sim" in plan
