"""This machine: devices, memory, compiler."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minisgl_core.builtin.devices import cuda_devices
from minisgl_core.installation import installed_version
from minisgl_core.registry import DeviceFacts

from .finding import Finding
from .isolated import Isolated

__all__ = ["Machine", "check_memory", "look_around", "weight_bytes"]

COMPILERS: Final = ("g++", "c++", "clang++")
GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class Machine:
    """``free_bytes``: of each device, in the order of the ranks; on a CPU the host's."""

    python: str
    torch: str
    devices: tuple[DeviceFacts, ...]
    free_bytes: tuple[int, ...]
    compiler: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "python": self.python,
            "torch": self.torch,
            "devices": [str(device) for device in self.devices],
            "free_bytes": list(self.free_bytes),
            "compiler": self.compiler or None,
        }


def look_around(device: DeviceFacts, timeout_s: float) -> Machine:
    """Ask this machine; CUDA is initialised in another process."""
    devices: tuple[DeviceFacts, ...] = (device,)
    free: tuple[int, ...] = (_host_free_bytes(),)
    if not device.about.on_host:
        with Isolated(timeout_s) as process:
            found, problem, _ = process.ask(cuda_devices)
        if not problem:
            devices = tuple(
                DeviceFacts(device.kind, one["sm"], one["name"], one["total_bytes"], len(found), device.driver)
                for one in found
            )
            free = tuple(one["free_bytes"] for one in found)
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), "")
    return Machine(platform.python_version(), installed_version("torch"), devices, free, compiler)


def _host_free_bytes() -> int:
    from minisgl_core.builtin.platform import CpuPlatform

    return CpuPlatform().free_bytes()


def weight_bytes(model: Path) -> int:
    """Size of a model's weight files."""
    if model.is_file():
        return model.stat().st_size
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def check_memory(machine: Machine, weights: int, tp_size: int) -> list[Finding]:
    """Do the weights fit? On a CPU all ranks share the host's memory."""
    on_host = machine.devices[0].about.on_host
    needed = weights if on_host else weights // tp_size
    return [
        Finding(
            "wrong",
            "memory",
            f"{'host' if on_host else f'rank {rank}'}",
            f"the weights take {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free",
            "end what uses the memory, or use a smaller model" + ("" if on_host else " or a larger --tp-size"),
        )
        for rank, free in enumerate(machine.free_bytes[:tp_size])
        if needed > free
    ]
