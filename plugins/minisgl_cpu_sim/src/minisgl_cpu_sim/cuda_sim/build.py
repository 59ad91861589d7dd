"""Compiles kernels for the simulator: once per change of a source or of the compiler, into the user's cache folder."""

from __future__ import annotations

import functools
import hashlib
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from minisgl_core.plugin_api import compile_once

from ..native.build import compiler_command, kernels_dir

__all__ = ["INCLUDE", "CompileError", "compile_kernels"]

_HERE = Path(__file__).parent
INCLUDE = _HERE / "include"
_FLAGS = ("-std=c++20", "-O1", "-fno-exceptions", "-w", f"-I{INCLUDE}")
# The instrumentation runs after the optimiser, which must not split or merge vector accesses.
# DWARF 4: some releases of addr2line name the wrong file of the newer format.
_KERNEL_FLAGS = ("-gdwarf-4", "-fsanitize=thread", "-fno-tree-sra", "-fno-tree-vectorize", "-fno-store-merging")


class CompileError(Exception):
    """The host's compiler or the simulator's ``minisgl/device.h`` rejects the kernels."""


def compile_kernels(sources: Sequence[Path], kernels: Sequence[str], include_dirs: Sequence[Path]) -> Path:
    """Build the library of ``kernels``, C++ expressions such as ``ns::copy<float>``, as ``minisgl_sim_entry_<i>``."""
    compiler = compiler_command()
    unit = _unit(sources, kernels)
    folder = kernels_dir() / "cuda_sim"
    files = sorted({*sources, *(path for folder in include_dirs for path in _tree(folder))})
    name = f"runtime-{_key(compiler, _FLAGS, _tree(_HERE))}"
    runtime = compile_once(folder, name, functools.partial(_compile_runtime, compiler))
    return compile_once(
        folder,
        f"{_key((*compiler, unit, name), _KERNEL_FLAGS, files)}.so",
        functools.partial(_compile_kernels, compiler, unit, include_dirs, runtime),
    )


def _tree(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in {".h", ".hpp", ".cuh", ".cu", ".cpp"})


def _key(command: Sequence[str], flags: Sequence[str], files: Sequence[Path]) -> str:
    digest = hashlib.sha256("\0".join((*command, *flags)).encode())
    for path in files:
        digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _unit(sources: Sequence[Path], kernels: Sequence[str]) -> str:
    lines = ["#include <minisgl/device.h>", *(f'#include "{source.resolve()}"' for source in sources)]
    for i, kernel in enumerate(kernels):
        lines.append(
            f'extern "C" void minisgl_sim_entry_{i}(const int64_t* slots) {{ minisgl_sim::call({kernel}, slots); }}'
        )
    return "\n".join(lines) + "\n"


def _compile_runtime(compiler: tuple[str, ...], target: Path) -> None:
    """Compile the runtime to a folder of object files."""
    target.mkdir()
    sources = sorted((_HERE / "runtime").glob("*.cpp"))
    _run(*([*compiler, *_FLAGS, "-c", str(source), "-o", f"{target}/{source.stem}.o"] for source in sources))


def _compile_kernels(
    compiler: tuple[str, ...], unit: str, include_dirs: Sequence[Path], runtime: Path, target: Path
) -> None:
    source, compiled = target.with_name("kernels.cpp"), target.with_name("kernels.o")
    source.write_text(unit)
    folders = [f"-I{folder}" for folder in include_dirs]
    _run([*compiler, *_FLAGS, *folders, *_KERNEL_FLAGS, "-c", str(source), "-o", str(compiled)])
    # -Bsymbolic: every library has its own simulator.
    objects = [str(compiled), *(str(path) for path in sorted(runtime.glob("*.o")))]
    _run([*compiler, "-shared", "-Wl,-Bsymbolic", *objects, "-o", str(target)])


def _run(*commands: Sequence[str]) -> None:
    """Run commands in parallel."""
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate()[1] for process in running]
    for command, process, error in zip(commands, running, errors, strict=True):
        if process.returncode != 0:
            raise CompileError(f"{shlex.join(command[:1])} failed:\n{error[:4000]}")
