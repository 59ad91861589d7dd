"""A GPU of any size for tests of memory: it computes on the CPU, counts the bytes of every tensor, and captures.

Everything that is allocated while :func:`simulated_gpu` is active counts, until the memory really is gone: what is
leaked stays counted. A real GPU's graphs take memory of their own; here each takes ``graph_bytes``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl_core.builtin.platform import CpuPlatform
from minisgl_core.engine import EngineConfig
from minisgl_core.engine.plan_resolution import make_plan
from minisgl_core.modelconfig import read_model_config
from minisgl_cpu_sim.graph import EmulatedGraph

__all__ = ["Meter", "simulated_gpu", "with_cuda_graphs"]


class Meter(TorchDispatchMode):
    """Bytes of the storages that operations gave back and that still exist; the most there ever were."""

    def __init__(self, total: int, graph_bytes: int) -> None:
        super().__init__()
        self.total, self.graph_bytes = total, graph_bytes
        self.used = self.peak = self.graphs = 0
        self.events: list[str] = []
        """What the device was asked to close, in order"""
        self._known = weakref.WeakSet[torch.UntypedStorage]()
        self._threads: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        return result

    def __enter__(self) -> Meter:
        """Modes are a thread's own: see :meth:`watch_thread`."""
        self._threads.add(threading.get_ident())
        super().__enter__()
        return self

    def watch_thread(self) -> None:
        """Count what the current thread allocates too, until :meth:`leave_thread`."""
        if threading.get_ident() not in self._threads:
            self.__enter__()

    def leave_thread(self) -> None:
        """The end of :meth:`watch_thread`; the main thread is left at the end of the ``with`` statement."""
        if threading.current_thread() is not threading.main_thread():
            self._threads.remove(threading.get_ident())
            self.__exit__(None, None, None)

    def add(self, count: int) -> None:
        """Take memory, or give it back."""
        self.used += count
        self.peak = max(self.peak, self.used)


class _Graph:
    def __init__(self, graph: EmulatedGraph[Any], meter: Meter) -> None:
        self._graph, self._meter = graph, meter
        meter.graphs += 1
        meter.add(meter.graph_bytes)

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self._graph.close()
        del self._graph
        self._meter.graphs -= 1
        self._meter.add(-self._meter.graph_bytes)
        self._meter.events.append("graph")


class _SimulatedGpu(CpuPlatform):
    meter: Meter

    def free_bytes(self) -> int:
        return self.meter.total - self.meter.used

    def total_bytes(self) -> int:
        return self.meter.total

    def peak_bytes(self, work: Callable[[], object]) -> int:
        before = self.meter.peak = self.meter.used
        work()
        return self.meter.peak - before

    def can_capture(self) -> bool:
        return True

    def capture(self, step: Callable[[], Any], pool: Any | None) -> tuple[Any, Any, Any]:
        graph = EmulatedGraph.capture(step, pool=pool, warmup=0)
        return _Graph(graph, self.meter), graph.result, graph.pool

    def activate(self) -> None:
        self.meter.watch_thread()

    def close(self) -> None:
        self.meter.leave_thread()
        self.meter.events.append("platform")


@contextmanager
def simulated_gpu(monkeypatch: pytest.MonkeyPatch, total: int, graph_bytes: int = 0) -> Iterator[Meter]:
    """While active, engines on the CPU find this device."""
    with Meter(total, graph_bytes) as meter:
        device = type("SimulatedGpu", (_SimulatedGpu,), {"meter": meter})
        monkeypatch.setattr("minisgl_core.builtin.platform.CpuPlatform", device)
        yield meter


def with_cuda_graphs(config: EngineConfig) -> EngineConfig:
    """The config with a plan that records decode steps through the runner of minisgl-cuda."""
    plan = make_plan(config, read_model_config(config.model_path)).to_json()
    for bucket in plan["buckets"]:
        if bucket["role"] == "graph":
            runner = {"name": "cuda", "factory": "minisgl_cuda.graph:CudaGraphRunner", "options_model": None}
            bucket["choice"] = {**bucket["choice"], **runner, "options": {}}
    return replace(config, plan=plan)
