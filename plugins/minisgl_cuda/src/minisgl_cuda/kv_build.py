"""Compiles the CUDA sources for one GPU architecture, once per machine, into the user's cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minisgl_core.plugin_api import CannotRun, Reason

__all__ = ["CSRC", "cache_dir", "compile_kernels", "compile_once", "probe"]

CSRC = Path(__file__).parent / "csrc"
_FLAGS = ("-shared", "-O3", "-std=c++17", "-Xcompiler", "-fPIC", "-I", str(CSRC))


def cache_dir() -> Path:
    """``minisgl/cuda`` in the user's cache folder, or ``cuda`` in ``MINISGL_CACHE_DIR``."""
    if named := os.environ.get("MINISGL_CACHE_DIR"):
        return Path(named).expanduser() / "cuda"
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "minisgl" / "cuda"


def compile_kernels(sm: int) -> Path:
    """The library of all kernels for compute capability ``sm`` (such as 90). Raises :class:`CannotRun`."""
    arch = ("-gencode", f"arch=compute_{sm},code=sm_{sm}")
    sources = sorted(path for path in CSRC.rglob("*") if path.suffix in {".cu", ".cuh", ".h"})
    return compile_once(f"CUDA kernels for sm_{sm}", ("nvcc", *_FLAGS, *arch), CSRC / "launch.cu", sources)


def probe(facts: Mapping[str, Any]) -> None:
    """Compile for the device, so that a compiler that cannot is a reason to choose another backend."""
    compile_kernels(facts["device"]["sm"])


def compile_once(what: str, command: Sequence[str], source: Path, key_files: Sequence[Path]) -> Path:
    """``command source -o`` a library, unless this compiler has made it of these files before.

    Announced on standard error. Raises :class:`CannotRun` with the compiler's first error.
    """
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="minisgl-"))  # no cache to keep it in: compile for this process
    target = folder / f"{source.stem}-{_key(command, key_files)}.so"
    if target.exists():
        return target
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of one engine wait for the first
        if not target.exists():
            print(f"minisgl: compiling the {what} with {command[0]}, once for this machine", file=sys.stderr)
            _compile(what, command, source, target)
    return target


def _key(command: Sequence[str], files: Sequence[Path]) -> str:
    digest = hashlib.sha256("\0".join((*command, _version(command[0]))).encode())
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise _refusal(compiler, str(error)) from error


def _compile(what: str, command: Sequence[str], source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        out = f"{scratch}/library.so"
        done = subprocess.run([*command, str(source), "-o", out], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).splitlines()
            first = next((line for line in lines if "error" in line or "fatal" in line), "".join(lines[:1]))
            raise _refusal(command[0], f"compiling the {what} failed: {first.strip()[:200]}")
        os.replace(out, target)


def _refusal(compiler: str, found: str) -> CannotRun:
    return CannotRun(
        Reason(
            code="compile-failed",
            field=compiler,
            wanted="a working compiler",
            supported=found,
            fix="name the variant `triton`, or install a CUDA toolkit that knows this GPU",
        )
    )
