"""Import strings."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["import_object"]


def import_object(path: str) -> Any:
    """The object that ``"package.module:Name"`` names; raises whatever importing raises."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
