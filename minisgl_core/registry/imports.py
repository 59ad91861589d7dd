"""Import strings."""

from __future__ import annotations

import importlib
from typing import Any

from minisgl_core.errors import nearest

__all__ = ["import_object"]


def import_object(path: str) -> Any:
    """The object that ``"package.module:Name"`` names; raises whatever importing raises."""
    name, _, attribute = path.partition(":")
    module = importlib.import_module(name)
    if not hasattr(module, attribute):
        hint = nearest(attribute, vars(module))
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}{f'; {hint}' if hint else ''}")
    return getattr(module, attribute)
