"""From a model or a geometry to measured results: engines are made here, one after the other."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl_core.engine import EngineConfig
from minisgl_core.env import ENV
from minisgl_core.llm.runner import Runner

from .limits import Ceilings, measure_ceilings
from .measure import Result, measure
from .model_folder import write_geometry

if TYPE_CHECKING:
    from minisgl_core.modelconfig import ModelConfig
    from minisgl_core.registry import Plan

    from .workloads import Workload

__all__ = ["ABLATIONS", "Variant", "ablate", "model_folder", "run_workload"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing changed against the default; ``config`` replaces fields of EngineConfig, ``backends`` single roles."""

    name: str
    config: Mapping[str, Any]
    backends: Mapping[str, Any]
    overlap: bool = True


def _variant(name: str, *, overlap: bool = True, backends: Mapping[str, Any] | None = None, **config: Any) -> Variant:
    return Variant(name, config, backends or {}, overlap)


ABLATIONS: tuple[Variant, ...] = (
    _variant("default"),
    _variant("no overlap scheduling", overlap=False),
    _variant("no CUDA graphs", cuda_graph_max_bs=0),
    _variant("no prefix cache", cache="naive"),
    _variant("attention flashinfer", backends={"attention": "flashinfer"}),
    _variant("attention fa", backends={"attention": "fa"}),
    _variant("attention fa + flashinfer", backends={"attention": {"prefill": "fa", "decode": "flashinfer"}}),
    _variant("attention flashinfer + fa", backends={"attention": {"prefill": "flashinfer", "decode": "fa"}}),
    _variant("attention fa + cuda_decode", backends={"attention": {"prefill": "fa", "decode": "cuda_decode"}}),
    _variant("kv Triton", backends={"kv": "cuda/triton"}),
    _variant("kv torch", backends={"kv": "torch"}),
    _variant("ops composed", backends={"ops": "composed"}),
    _variant("linear plain", backends={"linear": "plain"}),
    _variant("moe torch", backends={"moe": "torch"}),
    _variant("chunks of 2048", max_prefill_tokens=2048),
    _variant("chunks of 16384", max_prefill_tokens=16384),
    _variant("page size 1", page_size=1),
    _variant("page size 16", page_size=16),
    _variant("page size 64", page_size=64),
    _variant("page size 256", page_size=256),
)
"""Each optimisation switched off or exchanged alone, the rest as the default has it."""


@contextmanager
def model_folder(model: ModelConfig) -> Iterator[str]:
    """A folder that an engine of this geometry can be made from; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as scratch:
        yield str(write_geometry(model, Path(scratch)))


def run_workload(
    config: EngineConfig, workload: Workload, *, tp_size: int = 1, runs: int = 3, ceilings: Ceilings | None = None
) -> tuple[Result, Plan, Ceilings]:
    """One engine, one workload; the engine is gone afterwards."""
    runner = Runner(config, tp_size)
    try:
        ceilings = ceilings or measure_ceilings(runner.engine.platform, runner.engine.dtype)
        return measure(runner, workload, ceilings, runs, config.progress), runner.engine.plan, ceilings
    finally:
        runner.close()
        gc.collect()


def ablate(
    config: EngineConfig, workload: Workload, *, tp_size: int = 1, runs: int = 3
) -> Iterator[tuple[Variant, Result | Exception]]:
    """Every variant on the same work. One that cannot run here gives its error instead of a result."""
    ceilings: Ceilings | None = None
    usual = ENV.DISABLE_OVERLAP_SCHEDULING.value
    for variant in ABLATIONS:
        changed = replace(config, **variant.config, backends={**config.backends, **variant.backends})
        ENV.DISABLE_OVERLAP_SCHEDULING.value = usual or not variant.overlap
        try:
            result, _, ceilings = run_workload(changed, workload, tp_size=tp_size, runs=runs, ceilings=ceilings)
            yield variant, result
        except Exception as error:  # the table must show the others all the same
            yield variant, error
        finally:
            ENV.DISABLE_OVERLAP_SCHEDULING.value = usual
