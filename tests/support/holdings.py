"""How much an object holds on to: entries of every container that can be reached from it, for tests that look for what
grows with the work done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["holdings"]

KIT = "minisgl_core.testing"
"""Whose stub engine records every batch"""
CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def holdings(root: object) -> dict[str, int]:
    """``{path of attributes: entries}`` of the containers that objects of this project hold, ``root`` first.

    Of a bool array, entries that are True count, of another its size. Containers of one place are counted together:
    ``nodes[].children`` are the children of all nodes. Objects of other projects and of the kit are not looked into.
    """
    found: dict[str, int] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [(type(root).__name__, root)]
    while todo:
        path, thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, np.ndarray):
            count = int(np.count_nonzero(thing)) if thing.dtype == bool else thing.size
            found[path] = found.get(path, 0) + count
        elif isinstance(thing, CONTAINERS):
            found[path] = found.get(path, 0) + len(thing)
            parts = [*thing.keys(), *thing.values()] if isinstance(thing, dict) else thing
            todo += [(f"{path}[]", part) for part in parts]
        elif type(thing).__module__.startswith("minisgl") and not type(thing).__module__.startswith(KIT):
            todo += [(f"{path}.{name}", value) for name, value in _attributes(thing)]
    return found


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()
    for cls in type(thing).__mro__:
        for name in getattr(cls, "__slots__", ()):
            if hasattr(thing, name):
                yield name, getattr(thing, name)
