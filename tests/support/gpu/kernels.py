"""Our own kernels, as the sources of the installed plugins name them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

__all__ = ["PACKAGES", "kernels_by_file", "kernels_of"]

PACKAGES: Final = ("minisgl_cuda", "minisgl_flashinfer", "minisgl_moe")
GLOBAL: Final = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")


def kernels_of(files: Sequence[str]) -> frozenset[str]:
    """The kernels of these files, named as by :func:`kernels_by_file`. A file of an absent package has none."""
    found = kernels_by_file()
    return frozenset[str]().union(*(found.get(file, ()) for file in files))


def kernels_by_file() -> Mapping[str, frozenset[str]]:
    """Such as ``minisgl_cuda/triton_ops/norm.py`` -> names of its kernels, for each source that has some.

    A kernel is a ``__global__`` function of CUDA C++, or a function for Triton that no other one calls.
    """
    found: dict[str, frozenset[str]] = {}
    for package in PACKAGES:
        for root in _folders(package):
            found |= _triton_kernels(root)
            found |= {_name(path, root): names for path in _sources(root) if (names := _cuda_kernels(path))}
    return found


def _folders(package: str) -> Sequence[Path]:
    spec = find_spec(package)
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


def _name(path: Path, root: Path) -> str:
    return str(path.relative_to(root.parent))


def _sources(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.suffix in (".cu", ".cuh"))


def _cuda_kernels(path: Path) -> frozenset[str]:
    return frozenset(GLOBAL.findall(path.read_text()))


def _triton_kernels(root: Path) -> dict[str, frozenset[str]]:
    """By file. Functions may be called from other files of their package, under their own name."""
    made: dict[str, set[str]] = {}
    called: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                made.setdefault(_name(path, root), set()).add(node.name)
                called |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return {file: frozenset(names - called) for file, names in made.items() if names - called}
