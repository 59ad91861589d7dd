"""Compiles the C++ sources beside this file, once per machine, into the user's cache folder.

The library's name holds a hash of the sources, the compiler's version and the CPU's features, so a change of any of
them compiles anew. A file lock makes concurrent processes (the ranks of one engine) wait for one of them.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from minisgl_core.plugin_api import CannotRun, Reason

__all__ = ["build", "cache_dir", "compiler_command", "library"]

_SOURCES = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-pthread")
_CANDIDATES = ("g++", "c++", "clang++")


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded kernels. Raises :class:`CannotRun` if they cannot be compiled here."""
    return ctypes.CDLL(str(build(cache_dir())))


def cache_dir() -> Path:
    """``minisgl/cpu_sim`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "minisgl" / "cpu_sim"


def build(folder: Path) -> Path:
    """The path of the compiled library in ``folder``; compiles it there if it is missing."""
    command = compiler_command()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="minisgl-"))  # no cache to keep it in: compile for this process
    target = folder / f"kernels-{_key(command)}.so"
    if target.exists():
        return target
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            print(f"minisgl: compiling the CPU kernels with {command[0]}, once for this machine", file=sys.stderr)
            _compile(command, folder, target)
    return target


def compiler_command() -> tuple[str, ...]:
    """The compiler (environment variable CXX, or the first found) and its flags."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = named if named and shutil.which(named[0]) else [c for c in _CANDIDATES if shutil.which(c)][:1]
    if not found:
        raise CannotRun(
            Reason(
                code="no-compiler",
                field="C++ compiler",
                wanted="C++17",
                supported=", ".join(_CANDIDATES) + " or $CXX",
                fix="install g++",
            )
        )
    return (*found, *_FLAGS)


def _version(compiler: Sequence[str]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _key(command: tuple[str, ...]) -> str:
    version = _version(command[: command.index(_FLAGS[0])])
    digest = hashlib.sha256("\0".join((*command, version, _cpu_features())).encode())
    for path in sorted((*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _cpu_features() -> str:
    """What ``-march=native`` depends on: a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join((platform.machine(), *sorted(set(features))))


def _compile(command: tuple[str, ...], folder: Path, target: Path) -> None:
    """Compile every source at the same time, link, and move the result into place."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        sources = sorted(_SOURCES.glob("*.cpp"))
        objects = [f"{scratch}/{source.stem}.o" for source in sources]
        running = [
            subprocess.Popen([*command, "-c", str(source), "-o", out], stderr=subprocess.PIPE, text=True)
            for source, out in zip(sources, objects, strict=True)
        ]
        errors = [process.communicate()[1] for process in running]
        for process, error in zip(running, errors, strict=True):
            _check(process.returncode, error, command)
        linked = f"{scratch}/kernels.so"
        link = subprocess.run(
            [*command, "-shared", *objects, "-o", linked], capture_output=True, text=True, check=False
        )
        _check(link.returncode, link.stderr, command)
        os.replace(linked, target)


def _check(status: int, stderr: str, command: tuple[str, ...]) -> None:
    if status == 0:
        return
    first = next((line for line in stderr.splitlines() if "error" in line), stderr.strip())
    raise CannotRun(
        Reason(
            code="compile-failed",
            field="C++ compiler",
            wanted="the CPU kernels compiled",
            supported=f"{shlex.join(command)} failed: {first[:200]}",
            fix="install g++ 10 or newer, or set CXX to one",
        )
    )
