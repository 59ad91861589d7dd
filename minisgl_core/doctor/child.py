"""The questions that doctor asks in a throw-away process. Arguments and answers are JSON."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minisgl_core.errors import BackendError
from minisgl_core.registry import Choice, load_class

__all__ = ["cuda_devices", "import_plugin", "load_factory"]

HEAVY: Final = ("torch", "triton", "flashinfer", "flash_attn", "flash_attn_interface", "pydantic", "transformers")
"""What discovery must not import: it runs in every command, ``minisgl plugins`` included."""


def import_plugin(request: Mapping[str, Any]) -> dict[str, Any]:
    """Import a plugin's module in this process, where nothing but the contract has been imported before."""
    start = time.perf_counter()
    importlib.import_module(request["module"])
    elapsed_ms = (time.perf_counter() - start) * 1000
    return {"ms": elapsed_ms, "heavy": [name for name in HEAVY if name in sys.modules], "cuda": _cuda_touched()}


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
