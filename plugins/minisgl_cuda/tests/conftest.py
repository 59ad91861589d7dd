"""The CUDA sources as they run on a CPU: in the simulator of minisgl-cpu-sim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from minisgl_core.plugin_api import KVSetup
from minisgl_cpu_sim.cuda_sim import SimulatedProgram
from minisgl_cuda.kv_build import CSRC
from minisgl_cuda.kv_cpp import CudaKVKernels
from minisgl_cuda.kv_cpp.launch import INDEX, STORE, UNITS
from minisgl_cuda.launch import Kernel, Run, Shape
from minisgl_cuda.ops_cpp import ACT, ADD_NORM, INSTANCES, NORM, ROPE


class SimulatedLauncher:
    """Launches as the real one does, and keeps what was launched."""

    def __init__(self, program: SimulatedProgram) -> None:
        self._program = program
        self.seen: list[tuple[str, Shape]] = []

    def prepare(self, kernel: Kernel, arguments: str) -> Run:
        name = kernel.instance(arguments)

        def run(shape: Shape, tensors: tuple[torch.Tensor | None, ...], values: tuple[float, ...]) -> None:
            self.seen.append((name, shape))
            for tensor, at in zip(tensors, values, strict=False):
                assert at in (0, None if tensor is None else tensor.data_ptr())
            passed = [0 if at == 0 else tensor for tensor, at in zip(tensors, values, strict=False)]
            args: Any = dict(zip(kernel.fields, [*passed, *values[len(tensors) :]], strict=True))
            self._program.launch(name, shape.blocks, (shape.lanes, shape.rows), args)

        return run


@pytest.fixture(scope="session")
def kv_program() -> SimulatedProgram:
    kernels = [kernel.instance(unit) for kernel in (STORE, INDEX) for unit in UNITS.values()]
    return SimulatedProgram([CSRC / "kv_store.cuh", CSRC / "kv_index.cuh"], kernels, include_dirs=[CSRC])


@pytest.fixture(scope="session")
def ops_program() -> SimulatedProgram:
    kernels = [
        kernel.instance(arguments)
        for kernel in (NORM, ADD_NORM, ACT, ROPE)
        for both in INSTANCES.values()
        for arguments in both
    ]
    return SimulatedProgram([CSRC / f"{name}.cuh" for name in ("norm", "act", "rope")], kernels, include_dirs=[CSRC])


@pytest.fixture
def simulated_ops(ops_program: SimulatedProgram) -> SimulatedLauncher:
    """A launcher for the layer operations."""
    return SimulatedLauncher(ops_program)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling by as few programs as can be: the interpreter runs one after the other, and what all have to do first
    takes it long.
    """
    from minisgl_cuda.triton_ops import sample

    if not torch.cuda.is_available():
        monkeypatch.setattr(sample, "GATHERERS", 1)
        monkeypatch.setattr(sample, "WEIGHERS", 1)


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
