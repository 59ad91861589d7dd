"""Compiles the CUDA sources for one GPU architecture, once per machine, into the user's cache folder."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minisgl_core.plugin_api import CannotRun, Reason, cache_dir, compile_once, no_room

__all__ = ["CSRC", "compile_kernels", "compile_source", "probe"]

CSRC = Path(__file__).parent / "csrc"
_FLAGS = ("-shared", "-O3", "-std=c++17", "-Xcompiler", "-fPIC", "-I", str(CSRC))


def compile_kernels(sm: int) -> Path:
    """The library of all kernels for compute capability ``sm`` (such as 90). Raises :class:`CannotRun` if it cannot be
    built.
    """
    arch = ("-gencode", f"arch=compute_{sm},code=sm_{sm}")
    sources = sorted(path for path in CSRC.rglob("*") if path.suffix in {".cu", ".cuh", ".h"})
    return compile_source(f"CUDA kernels for sm_{sm}", ("nvcc", *_FLAGS, *arch), CSRC / "launch.cu", sources)


def probe(facts: Mapping[str, Any]) -> None:
    """Compile for the device, so that a failing compiler is a reason to choose another backend."""
    compile_kernels(facts["device"]["sm"])


def compile_source(what: str, command: Sequence[str], source: Path, key_files: Sequence[Path]) -> Path:
    """Run ``command source -o LIBRARY``, unless the cache has the library of this compiler and these files.

    A compilation is announced on standard error. Raises :class:`CannotRun` with the compiler's first error.
    """

    def compile_to(target: Path) -> None:
        _compile(what, command, source, target)

    name = f"{source.stem}-{_key(command, key_files)}.so"
    return compile_once(cache_dir("cuda"), name, compile_to, f"the {what} with {command[0]}")


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
    done = subprocess.run([*command, str(source), "-o", str(target)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).splitlines()
        first = next((line for line in lines if "error" in line or "fatal" in line), "".join(lines[:1]))
        raise _refusal(command[0], f"compiling the {what} failed: {first.strip()[:200]}")


def _refusal(compiler: str, found: str) -> CannotRun:
    return CannotRun(
        no_room(found)
        or Reason(
            code="compile-failed",
            field=compiler,
            wanted="a working compiler",
            supported=found,
            fix="name the variant `triton`, or install a CUDA toolkit that knows this GPU",
        )
    )
