"""What doctor calls in a throw-away process. Arguments and answers are JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl_core.errors import BackendError
from minisgl_core.registry import Choice, load_class

__all__ = ["load_factory"]


def load_factory(choice: Mapping[str, Any]) -> list[str]:
    """Import what a spec's factory names, and check that it has its role's methods; returns what is wrong, if anything,
    and the name of the exception behind it.
    """
    try:
        load_class(Choice.from_json(choice))
    except BackendError as error:
        return [error.message, type(error.__cause__).__name__]
    return []
