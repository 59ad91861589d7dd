"""A CUDA driver for Triton that starts nothing: what a launch costs the host can then be measured without a GPU.

Triton is real: it compiles for a Hopper GPU, specialises, packs arguments and encodes tensor descriptors; behind it is
a library with the driver's functions, all of which succeed at once. Tensors are in host memory. Set it up before
the first kernel is defined, and where ``TRITON_INTERPRET`` is not set.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import torch

__all__ = ["free_triton"]

_NOTHING = (
    *("cuInit", "cuCtxGetLimit", "cuCtxSetCurrent", "cuCtxSetLimit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"),
    *("cuDriverGetVersion", "cuFuncSetAttribute", "cuFuncSetCacheConfig", "cuLaunchKernelEx", "cuModuleUnload"),
    *("cuOccupancyMaxActiveClusters", "cuPointerGetAttributes", "cuStreamIsCapturing", "cuTensorMapEncodeIm2col"),
    *("cuTensorMapEncodeTiled", "cuCtxGetDevice", "cuMemAlloc_v2", "cuMemFree_v2"),
)
_DRIVER = (
    "".join(f"int {name}() {{ return 0; }}\n" for name in _NOTHING)
    + """
int cuGetErrorString(int code, const char** text) { *text = "no driver"; return 0; }
int cuCtxGetCurrent(void** context) { *context = (void*)1; return 0; }
int cuDeviceGetAttribute(int* value) { *value = 227 * 1024; return 0; }
int cuFuncGetAttribute(int* value, int which) { *value = which == 0 ? 1024 : 0; return 0; }
int cuModuleLoadData(void** module) { *module = (void*)1; return 0; }
int cuModuleGetFunction(void** function) { *function = (void*)1; return 0; }
int cuPointerGetAttribute(unsigned long long* to, int which, unsigned long long from) { *to = from; return 0; }
"""
)
"""``cuDeviceGetAttribute`` returns the shared memory of a block, ``cuFuncGetAttribute`` its threads."""


def free_triton(folder: Path) -> None:
    """From now on, in this process, Triton's kernels launch into nothing. ``folder`` holds the library."""
    (folder / "driver.c").write_text(_DRIVER)
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-O2", "-w", "-std=gnu99", f"-Wl,-soname,{library.name}"]
    subprocess.run([*command, folder / "driver.c", "-o", library], check=True)
    (folder / "libcuda.so").symlink_to(library)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    class FreeDriver(CudaDriver):  # type: ignore[misc]
        """Device 0 is a Hopper GPU."""

        def __init__(self) -> None:
            super().__init__()
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device: 0
            self.get_device_capability = lambda device: (9, 0)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    driver.set_active(FreeDriver())
