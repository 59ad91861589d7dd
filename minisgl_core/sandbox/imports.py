"""What importing a plugin does to its process, and which modules of the core its code imports."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from minisgl_core.errors import nearest

__all__ = ["HEAVY", "changed_variables", "import_object", "import_plugin", "private_imports"]

_LIBRARIES: Final[Mapping[str, list[str]]] = json.loads(
    Path(__file__).with_name("libraries.json").read_text(encoding="utf-8")
)
HEAVY: Final = tuple(_LIBRARIES["heavy"])
"""What discovery must not import: it runs in every command, ``minisgl plugins`` included."""
_OWN_VARIABLES: Final = tuple(_LIBRARIES["own_variables"])
CORE: Final = "minisgl_core"
PUBLIC: Final = ("plugin_api", "layers", "testing")
"""Modules of the core that plugins may import: the contract, what models are made of, and the kit for their tests."""


def import_object(path: str) -> Any:
    """The object that ``"package.module:Name"`` names; raises whatever importing raises."""
    name, _, attribute = path.partition(":")
    module = importlib.import_module(name)
    if not hasattr(module, attribute):
        hint = nearest(attribute, vars(module))
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}{f'; {hint}' if hint else ''}")
    return getattr(module, attribute)


class _Process(NamedTuple):
    """What all code of a process shares."""

    environment: dict[str, str]
    folder: str
    threads: set[str]
    handlers: dict[str, Any]

    @classmethod
    def now(cls) -> _Process:
        handlers = {number.name: signal.getsignal(number) for number in signal.Signals}
        return cls(dict(os.environ), os.getcwd(), {thread.name for thread in threading.enumerate()}, handlers)

    def effects(self) -> Iterator[str]:
        """What has changed since, one text for each kind of change."""
        now = _Process.now()
        if variables := changed_variables(self.environment, now.environment):
            yield f"changes the environment: {', '.join(variables)}"
        if now.folder != self.folder:
            yield f"changes the working directory to {now.folder}"
        if threads := sorted(now.threads - self.threads):
            yield f"starts the threads {', '.join(threads)}"
        if signals := [name for name, handler in now.handlers.items() if handler != self.handlers[name]]:
            yield f"handles the signals {', '.join(signals)}"


def import_plugin(request: Mapping[str, Any]) -> dict[str, Any]:
    """Import a plugin's ``module`` in this process, in which nothing but the contract has been imported before, and
    call its hooks; then import the ``factories``' modules, which may be heavy.

    ``device_use`` names a function that says how the import has initialised a device, "" if it has not.
    """
    before, start = _Process.now(), time.perf_counter()
    module = importlib.import_module(request["module"])
    elapsed_ms = (time.perf_counter() - start) * 1000
    heavy = [name for name in HEAVY if name in sys.modules]
    device = import_object(request["device_use"])() if "device_use" in request else ""
    for name in request.get("factories", ()):
        importlib.import_module(name)
    for hook in (value for value in vars(module).values() if hasattr(value, "minisgl_impl")):
        with contextlib.suppress(Exception, SystemExit, KeyboardInterrupt):  # loading the plugin will report it
            hook()
    return {"ms": elapsed_ms, "heavy": heavy, "device": device, "effects": list(before.effects())}


def changed_variables(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Environment variables that were set, changed or removed, except those that heavy libraries set themselves."""
    return sorted({name for name, _ in before.items() ^ now.items() if not name.startswith(_OWN_VARIABLES)})


def private_imports(module: str) -> list[str]:
    """What the package that holds ``module`` imports of the core beyond :data:`PUBLIC`, such as ``minisgl_core.engine
    (kernel.py:3)``. Its files are read and not run; the core itself may import anything.
    """
    package = module.partition(".")[0]
    if package == CORE:
        return []
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    folders = list(spec.submodule_search_locations or ())
    sources = [file for folder in folders for file in sorted(Path(folder).rglob("*.py"))]
    if not folders and spec.origin:
        sources = [Path(spec.origin)]
    return [f"{name} ({file.name}:{line})" for file in sources for name, line in _core_imports(file)]


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
