"""Compiles the C++ sources in this folder, once per machine, into the user's cache folder.

The library's name holds a hash of the sources, the flags and the CPU's features, and one of the compiler: a change of
any of them compiles anew. Where no compiler works, what another one made of the same sources for such a CPU will do.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from pathlib import Path

from minisgl_core.plugin_api import CannotRun, Reason, cache_dir, compile_once, find_compiled, host_compiler, no_room

__all__ = ["build", "check", "compiler_command", "kernels_dir", "library"]

_SOURCES = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-pthread")
_PROBE_SOURCE = f'#include "{_SOURCES / "vec.h"}"\n#include <thread>\n'
"""A source with the most demanding header of the kernels, compiled in place of all kernels."""


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded kernels. Raises :class:`CannotRun` if they cannot be compiled or loaded here."""
    path = build(kernels_dir())
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotRun(
            Reason("load-failed", "CPU kernels", "a library for this system", str(error), f"delete {path}")
        ) from error


def kernels_dir() -> Path:
    """Where the compiled kernels are kept."""
    return cache_dir("cpu_sim")


def check() -> None:
    """Raise :class:`CannotRun` if the kernels can be neither found nor compiled here.

    If they are not compiled yet, only a small program is compiled: the kernels themselves take half a minute.
    """
    if library.cache_info().currsize or _made_by_any(kernels_dir()) is not None:
        return
    command = compiler_command()
    if find_compiled(kernels_dir(), _name(command)) is None:
        _try(command)


def build(folder: Path) -> Path:
    """The path of the compiled library in ``folder``; compiles it there if it is missing."""
    other = _made_by_any(folder)
    try:
        command = compiler_command()
        name = _name(command)
        if other is not None and find_compiled(folder, name) is None:
            _try(command)
        return compile_once(folder, name, functools.partial(_compile, command), f"the CPU kernels with {command[0]}")
    except CannotRun:
        if other is None:
            raise
        return other


def compiler_command() -> tuple[str, ...]:
    """The compiler (environment variable CXX, or the first found) and its flags."""
    return (*host_compiler(), *_FLAGS)


def _made_by_any(folder: Path) -> Path | None:
    """The library built by any compiler; None if CXX names one."""
    return None if _is_named() else find_compiled(folder, f"kernels-{_source_key()}-*.so")


def _is_named() -> bool:
    return bool(os.environ.get("CXX", "").strip())


def _name(command: tuple[str, ...]) -> str:
    compiler = command[: -len(_FLAGS)]
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise _refusal(command, str(error)) from error
    digest = hashlib.sha256("\0".join((*compiler, version)).encode()).hexdigest()
    return f"kernels-{_source_key()}-{digest[:8]}.so"


def _source_key() -> str:
    digest = hashlib.sha256("\0".join((*_FLAGS, _cpu_features())).encode())
    for path in sorted((*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _cpu_features() -> str:
    """The CPU features that ``-march=native`` depends on: machines with different CPUs may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join((platform.machine(), *sorted(set(features))))


def _try(command: tuple[str, ...]) -> None:
    """Compile and link a small program."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            probe = [*command, "-shared", "-x", "c++", "-", "-o", f"{scratch}/probe.so"]
            done = subprocess.run(probe, input=_PROBE_SOURCE, capture_output=True, text=True, check=False)
    except OSError as error:
        raise _refusal(command, str(error)) from error
    _check(done.returncode, done.stderr, command)


def _compile(command: tuple[str, ...], target: Path) -> None:
    """Compile all sources in parallel, then link. No other process uses the folder of ``target``."""
    sources = sorted(_SOURCES.glob("*.cpp"))
    objects = [str(target.with_name(f"{source.stem}.o")) for source in sources]
    running = [
        subprocess.Popen([*command, "-c", str(source), "-o", out], stderr=subprocess.PIPE, text=True)
        for source, out in zip(sources, objects, strict=True)
    ]
    errors = [process.communicate()[1] for process in running]
    for process, error in zip(running, errors, strict=True):
        _check(process.returncode, error, command)
    link = [*command, "-shared", *objects, "-o", str(target)]
    done = subprocess.run(link, capture_output=True, text=True, check=False)
    _check(done.returncode, done.stderr, command)


def _check(status: int, stderr: str, command: tuple[str, ...]) -> None:
    if status == 0:
        return
    lines = [line for line in stderr.splitlines() if line.strip()] or [f"exit code {status}, without a word"]
    raise _refusal(command, next((line for line in lines if "error" in line), lines[0]))


def _refusal(command: tuple[str, ...], problem: str) -> CannotRun:
    compiler, named = shlex.join(command[: -len(_FLAGS)]), _is_named()
    return CannotRun(
        no_room(problem)
        or Reason(
            code="compile-failed",
            field="CXX" if named else "C++ compiler",
            wanted="the CPU kernels compiled",
            supported=f"{compiler} failed: {problem[:200]}",
            fix="set CXX to g++ 10 or newer, or unset it" if named else "install g++ 10 or newer, or set CXX to one",
        )
    )
