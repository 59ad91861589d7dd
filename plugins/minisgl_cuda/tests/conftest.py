"""The backend ``kv:cuda`` as it runs on a CPU: its CUDA sources in the simulator of minisgl-cpu-sim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from minisgl_core.plugin_api import KVSetup
from minisgl_cpu_sim.cuda_sim import SimulatedProgram
from minisgl_cuda.kv_build import CSRC
from minisgl_cuda.kv_cpp import CudaKVKernels
from minisgl_cuda.kv_cpp.launch import INDEX, STORE, UNITS, Kernel, Shape


class SimulatedLauncher:
    """Launches as the real one does, and keeps what was launched."""

    def __init__(self, program: SimulatedProgram) -> None:
        self._program = program
        self.seen: list[tuple[str, Shape]] = []

    def launch(self, kernel: Kernel, unit: int, shape: Shape, values: tuple[Any, ...]) -> None:
        name = kernel.instance(unit)
        self.seen.append((name, shape))
        args = dict(zip(kernel.fields, values, strict=True))
        self._program.launch(name, shape.blocks, (shape.lanes, shape.rows), args)


@pytest.fixture(scope="session")
def kv_program() -> SimulatedProgram:
    kernels = [kernel.instance(unit) for kernel in (STORE, INDEX) for unit in UNITS]
    return SimulatedProgram([CSRC / "kv_store.cuh", CSRC / "kv_index.cuh"], kernels, include_dirs=[CSRC])


@pytest.fixture
def simulated(kv_program: SimulatedProgram) -> SimulatedLauncher:
    return SimulatedLauncher(kv_program)


@pytest.fixture(scope="session")
def kv_setup() -> Callable[..., KVSetup]:
    def make(dtype: torch.dtype = torch.float32) -> KVSetup:
        return KVSetup(torch.device("cpu"), dtype, dtype, 1, 1, 8)

    return make


@pytest.fixture
def simulated_kv(simulated: SimulatedLauncher, kv_setup: Callable[..., KVSetup]) -> CudaKVKernels:
    return CudaKVKernels(kv_setup(), launcher=simulated)
