"""Sessions: an engine is created for a model or a geometry, measured, and closed."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl_core.engine import EngineConfig
from minisgl_core.llm import LLM

from .limits import Ceilings, measure_ceilings
from .measure import Result, measure
from .model_folder import write_geometry

if TYPE_CHECKING:
    from minisgl_core.engine.memory import MemoryUse
    from minisgl_core.modelconfig import ModelConfig
    from minisgl_core.registry import Plan

    from .workloads import Workload

__all__ = ["Session", "model_folder", "open_session", "thrifty"]


@contextmanager
def model_folder(model: ModelConfig) -> Iterator[str]:
    """A temporary folder from which an engine of this geometry can be created."""
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as scratch:
        yield str(write_geometry(model, Path(scratch)))


@dataclass(frozen=True, slots=True)
class Session:
    """A running engine that can be measured on several workloads."""

    llm: LLM
    ceilings: Ceilings
    start_s: float
    """Seconds until the engine was ready."""

    @property
    def plan(self) -> Plan:
        return self.llm.plan

    @property
    def memory(self) -> MemoryUse:
        return self.llm.engine.memory

    def measure(self, workload: Workload, repeat: int = 3, **more: Any) -> Result:
        """See :func:`~minisgl_core.bench.measure.measure`."""
        return measure(self.llm, workload, self.ceilings, repeat, progress=self.llm.engine.config.progress, **more)


@contextmanager
def open_session(config: EngineConfig, tp_size: int = 1, ceilings: Ceilings | None = None) -> Iterator[Session]:
    """Start an engine, and close it afterwards. ``ceilings``: those of this device, if they are known."""
    begin = time.perf_counter()
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    settings.pop("tp_info")
    llm = LLM(settings.pop("model_path"), settings.pop("dtype"), tp_size, **settings)
    try:
        start_s = time.perf_counter() - begin
        ceilings = ceilings or measure_ceilings(llm.engine.platform, llm.engine.dtype)
        yield Session(llm, ceilings, start_s)
    finally:
        llm.shutdown()
        gc.collect()


def thrifty(config: EngineConfig, workloads: Sequence[Workload]) -> EngineConfig:
    """The config with only the graphs that these workloads use, because capturing takes most of a start."""
    largest = max(len(workload.prompts) for workload in workloads)
    if config.cuda_graph_max_bs is None or config.cuda_graph_max_bs > largest:
        config = replace(config, max_running_req=min(config.max_running_req, largest))
    if all(workload.temperature > 0 for workload in workloads):
        config = replace(config, cuda_graph_modes=("random",))
    return config
