"""Role ``platform``: the CPU and NVIDIA GPUs. The only place in the core that speaks to ``torch.cuda``."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from minisgl_core.errors import EngineError

__all__ = ["CpuPlatform", "CudaPlatform"]


class _CpuEvent:
    """On a CPU all work is done when it returns, so only the time of the mark is kept."""

    _at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _CpuEvent) -> float:
        return (end._at - self._at) * 1000


class CpuPlatform:
    """Synchronous execution in the calling thread."""

    name = "cpu"
    sm = 0

    def __init__(self, device_index: int = 0) -> None:
        self.device = torch.device("cpu")

    def activate(self) -> None:
        pass

    def new_event(self, *, timing: bool = False) -> _CpuEvent:
        return _CpuEvent()

    def wait_event(self, event: Any) -> None:
        pass

    def stream_handle(self) -> int:
        return 0

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        yield

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def synchronize(self) -> None:
        pass

    def free_bytes(self) -> int:
        """Memory the kernel says a new program could take without swapping."""
        try:
            with open("/proc/meminfo", encoding="ascii") as lines:
                for line in lines:
                    if line.startswith("MemAvailable:"):
                        return int(line.split()[1]) * 1024
        except OSError:
            pass  # not Linux: fall through to what POSIX offers
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def total_bytes(self) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def can_capture(self) -> bool:
        return False

    def capture(self, step: Callable[[], Any], pool: Any | None) -> tuple[Any, Any, Any]:
        raise EngineError(
            "a CPU has no graphs of its own",
            field="graph",
            value="cpu",
            remedy="use the `emulated` graph runner of minisgl-cpu-sim",
        )

    def close(self) -> None:
        pass


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self._graph.reset()


class CudaPlatform:
    """One NVIDIA GPU with a compute stream of the engine's own and a side stream for copies to the host."""

    name = "cuda"

    def __init__(self, device_index: int = 0) -> None:
        self.device = torch.device("cuda", device_index)
        torch.cuda.set_device(self.device)
        major, minor = torch.cuda.get_device_capability(self.device)
        self.sm = 10 * major + minor
        self._stream = torch.cuda.Stream(self.device)
        self._side = torch.cuda.Stream(self.device)
        self._index = device_index
        _OPEN.add(self)

    def activate(self) -> None:
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(self._stream)

    def new_event(self, *, timing: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timing)

    def wait_event(self, event: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def stream_handle(self) -> int:
        # Asked before every launch of a kernel that is not torch's: this entry makes no Stream object.
        return torch._C._cuda_getCurrentRawStream(self._index)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self._side):
            yield

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]

    def peak_bytes(self, work: Callable[[], object]) -> int:
        before = self.free_bytes()
        work()
        self.synchronize()
        # The allocator gives nothing back by itself: what is missing now is the most that was ever taken at once.
        return max(0, before - torch.cuda.mem_get_info(self.device)[0])

    def can_capture(self) -> bool:
        return True

    def capture(self, step: Callable[[], Any], pool: Any | None) -> tuple[Any, Any, Any]:
        graph = torch.cuda.CUDAGraph()
        # calls of other threads that a capture forbids, such as another engine taking memory, are their own affair
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            output = step()
        return _CudaGraph(graph), output, pool if pool is not None else graph.pool()

    def close(self) -> None:
        self.synchronize()
        torch.cuda.set_stream(torch.cuda.default_stream(self.device))
        _OPEN.discard(self)
        if not _OPEN:  # the graphs of another engine go on to write to theirs
            torch._C._cuda_clearCublasWorkspaces()  # one per stream that ever multiplied: the engines' streams
        torch.cuda.empty_cache()


_OPEN: weakref.WeakSet[CudaPlatform] = weakref.WeakSet()
"""Those of this process that are not closed."""
