"""The questions that doctor asks in a throw-away process. Arguments and answers are JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl_core.errors import BackendError
from minisgl_core.registry import Choice, load_class
from minisgl_core.registry.import_hygiene import import_plugin

__all__ = ["cuda_devices", "import_plugin", "load_factory"]


def load_factory(choice: Mapping[str, Any]) -> list[str]:
    """Import what a spec's factory names, and check that it has its role's methods; returns what is wrong, if anything,
    and the name of the exception behind it.
    """
    try:
        load_class(Choice.from_json(choice))
    except BackendError as error:
        return [error.message, type(error.__cause__).__name__]
    return []


def cuda_devices(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every CUDA device: ``sm``, ``name``, ``total_bytes``, ``free_bytes``."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        sm = properties.major * 10 + properties.minor
        found.append({"sm": sm, "name": properties.name, "total_bytes": total, "free_bytes": free})
    return found
