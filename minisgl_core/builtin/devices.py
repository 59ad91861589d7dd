"""The devices of this machine, found without initialising CUDA in this process and without importing torch."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minisgl_core.errors import BackendError
from minisgl_core.installation import installed_version
from minisgl_core.registry import DeviceFacts
from minisgl_core.sandbox import Sandbox, SandboxError

__all__ = ["cuda_devices", "cuda_use", "detect_device"]

_DRIVER: Final = Path("/proc/driver/nvidia/version")
_TRACES: Final = ((Path("/proc/driver/nvidia"), "version"), (Path("/dev"), "nvidia[0-9]*"), (Path("/dev"), "dxg"))
"""Where a CUDA driver shows itself (containers may hide some of these, WSL has only the last). Without any of them no
process is started to ask."""
_CPU: Final = DeviceFacts("cpu")


def detect_device(kind: str = "auto") -> DeviceFacts:
    """The device to run on: ``auto`` takes CUDA device 0 if there is one.

    Raises :class:`BackendError` if ``cuda`` is requested and absent.
    """
    if kind == "cpu" or (kind == "auto" and not any(any(folder.glob(name)) for folder, name in _TRACES)):
        return _CPU
    found, problem = _cuda_device()
    if found is None and kind == "cuda":
        raise BackendError(
            f"no CUDA device can be used: {problem}",
            field="device",
            value=kind,
            remedy="take the CPU (--device cpu), or see nvidia-smi",
        )
    return found or _CPU


def _cuda_device() -> tuple[DeviceFacts | None, str]:
    driver = _driver_version()
    versions = (driver, installed_version("torch"), os.environ.get("CUDA_VISIBLE_DEVICES", ""), *_device_nodes())
    try:
        with Sandbox() as child:
            answer = child.call(f"{__name__}:cuda_facts", {}, versions)
    except SandboxError as error:
        return None, f"the probe process {error}"
    if not answer["ok"]:
        return None, str(answer.get("error"))
    return DeviceFacts(**answer["value"], driver=driver), ""


def _driver_version() -> str:
    with contextlib.suppress(OSError):
        match = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text())
        return match[0] if match else ""
    return ""


def _device_nodes() -> list[str]:
    """Device files and identities: another card in the same machine is another answer."""
    return sorted(str(path) for path in Path("/proc/driver/nvidia/gpus").glob("*"))


def cuda_facts(_: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of CUDA device 0. Imports torch and initialises CUDA: only in a throw-away process."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees none")
    return {"kind": "cuda", **_properties(0), "count": torch.cuda.device_count()}


def cuda_devices(_: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every CUDA device: ``sm``, ``name``, ``total_bytes``, ``free_bytes``. Only in a throw-away process, too."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [{**_properties(index), "free_bytes": torch.cuda.mem_get_info(index)[0]} for index in range(count)]


def _properties(index: int) -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_properties(index)
    return {"sm": found.major * 10 + found.minor, "name": found.name, "total_bytes": found.total_memory}


def cuda_use() -> str:
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
