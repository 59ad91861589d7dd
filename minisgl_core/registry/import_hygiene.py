"""What importing a plugin does to the process, and what of the core its code imports."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["HEAVY", "changed_variables", "import_plugin", "private_imports"]

HEAVY: Final = ("torch", "triton", "flashinfer", "flash_attn", "flash_attn_interface", "pydantic", "transformers")
"""What discovery must not import: it runs in every command, ``minisgl plugins`` included."""
CORE: Final = "minisgl_core"
OF_LIBRARIES: Final = ("TORCHINDUCTOR_", "TRITON_", "CUDA_MODULE_LOADING", "KINETO_")
PUBLIC: Final = ("plugin_api", "layers", "testing")
"""Modules of the core that plugins may import: the contract, what models are made of, and the kit for their tests."""


def import_plugin(request: Mapping[str, Any]) -> dict[str, Any]:
    """Import a plugin's ``module`` in this process, in which nothing but the contract has been imported before, and
    then the ``factories``' modules, which may be heavy.

    ``environment`` names the variables that were changed by either.
    """
    environment, start = dict(os.environ), time.perf_counter()
    importlib.import_module(request["module"])
    elapsed_ms = (time.perf_counter() - start) * 1000
    heavy, cuda = [name for name in HEAVY if name in sys.modules], _cuda_touched()
    for name in request.get("factories", ()):
        importlib.import_module(name)
    changed = changed_variables(environment, os.environ)
    return {"ms": elapsed_ms, "heavy": heavy, "cuda": cuda, "environment": changed}


def changed_variables(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Environment variables that were set, changed or removed, but for those of torch and Triton."""
    return sorted({name for name, _ in before.items() ^ now.items() if not name.startswith(OF_LIBRARIES)})


def _cuda_touched() -> str:
    """How CUDA was initialised in this process; empty if it was not."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "torch has initialised CUDA"
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed by now
            target = os.readlink(link)
            if target.startswith("/dev/nvidia"):
                return f"{target} is open"
    return ""


def private_imports(module: str) -> list[str]:
    """What the package that holds ``module`` imports of the core beyond :data:`PUBLIC`, such as ``minisgl_core.engine
    (kernel.py:3)``. Its files are read, none is run; the core itself may import what it likes.
    """
    package = module.partition(".")[0]
    if package == CORE:
        return []
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    folders = list(spec.submodule_search_locations or ())
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.py"))]
    if not folders and spec.origin:
        files = [Path(spec.origin)]
    return [f"{name} ({file.name}:{line})" for file in files for name, line in _core_imports(file)]


def _core_imports(file: Path) -> Iterator[tuple[str, int]]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        for name in _imported(node):
            parts = name.split(".")
            if parts[0] == CORE and len(parts) > 1 and parts[1] not in PUBLIC and not parts[1].startswith("__"):
                yield name, getattr(node, "lineno", 0)


def _imported(node: ast.AST) -> list[str]:
    """Full names that a statement, or a call of ``import_module``, imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        whole = node.module == CORE  # then the names are its modules
        return [f"{node.module}.{alias.name}" for alias in node.names] if whole else [node.module]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
        return [item.value for item in node.args[:1] if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return []
