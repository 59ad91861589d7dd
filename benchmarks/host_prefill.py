"""The host's own time per eager prefill pass, on a machine without a GPU.

    python benchmarks/host_prefill.py             # dense layers
    python benchmarks/host_prefill.py --experts   # layers of experts

Engine, model, minisgl-cuda and minisgl-fa are real, down to the packed struct of each launch. The library behind it
launches nothing, and FlashAttention 3 is a function that returns at once. Matrices are tiny, so that only the
framework's work around a product remains. The sum is what the host has to do before a device can have the last kernel
of a pass, except for the driver's part and FlashAttention's own C++.

With ``--experts`` minisgl-moe is real too, and so is Triton, on a driver that launches nothing; its first run compiles.

Needs a C compiler, minisgl-cuda, minisgl-fa and triton; with ``--experts`` minisgl-moe.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from commandline import Parser, run
from free_triton import free_triton

import minisgl_cuda.launch
import minisgl_cuda.plugin
import minisgl_fa.plugin
import minisgl_moe.plugin
from minisgl_core.builtin.platform import CpuPlatform
from minisgl_core.core import Batch, Req, SamplingParams
from minisgl_core.engine import Engine, EngineConfig
from minisgl_core.engine.plan_resolution import make_plan
from minisgl_core.errors import UsageError
from minisgl_core.modelconfig import read_model_config
from minisgl_core.plugin_api import BackendSpec
from minisgl_cpu_sim.fakes import flash_attn_interface
from minisgl_moe.tiles import Geometry, Tile, Tiling, dump_table

LAYERS, FEW_LAYERS = 28, 4
"""The layers of Qwen3-0.6B, and a smaller number, whose difference gives the cost of one layer."""
ROWS, ROW_TOKENS = 20, 2
"""More rows than the Triton kernels for products of few rows accept, because those need a GPU."""
WARM_PASSES, PASSES = 30, 300
GEOMETRY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
TILE = Tile(16, 64, 64, swap=1, tma=1)
"""As measured on an H200 for as many tokens."""
NO_LAUNCHES = """
int minisgl_cuda_launch(const void* launch) { return launch == 0; }
int minisgl_cuda_find(const char* name, const void** kernel) { *kernel = name; return 0; }
const char* minisgl_cuda_error(int code) { return code ? "no launch" : "success"; }
"""


@contextmanager
def free_experts(folder: Path) -> Iterator[None]:
    """Context in which moe:fused treats the CPU as a Hopper GPU with measured tiles, and Triton launches nothing."""
    from minisgl_moe import executor

    free_triton(folder)
    geometry = Geometry(90, "float32", 128, 8, 32, 32)
    (folder / geometry.file_name).write_text(dump_table({1: Tiling(True, TILE, TILE)}))
    with patch.object(CpuPlatform, "sm", 90), patch.object(executor, "SHIPPED", folder):
        yield


@contextmanager
def free_kernels(folder: Path) -> Iterator[None]:
    """Context in which engines launch nothing."""
    source, library = folder / "launch.c", folder / "launch.so"
    source.write_text(NO_LAUNCHES)
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", source, "-o", library], check=True)
    sys.modules["flash_attn_interface"] = free_flash_attention()
    with patch.object(minisgl_cuda.launch, "compile_kernels", lambda sm: library):
        yield
    del sys.modules["flash_attn_interface"]


def free_flash_attention() -> ModuleType:
    """A ``flash_attn_interface`` whose kernels cost nothing."""
    schedule = torch.zeros(1, dtype=torch.int32)
    outs: dict[torch.Size, torch.Tensor] = {}

    def forward(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        shape = q.shape
        if shape not in outs:
            outs[shape] = torch.zeros(shape)
        return (outs[shape],)

    library: Any = ModuleType("flash_attn_interface")
    forward._schema = flash_attn_interface.flash_attn_3_gpu.fwd.default._schema  # type: ignore[attr-defined]
    library.flash_attn_3_gpu = SimpleNamespace(fwd=SimpleNamespace(default=forward))
    library.get_scheduler_metadata = lambda *args, **options: schedule
    result: ModuleType = library
    return result


def gpu_plan(plan: dict[str, Any]) -> dict[str, Any]:
    """A CPU's plan with the backends of a Hopper GPU for all that the model's layers call."""
    cuda, buckets = minisgl_cuda.plugin, [dict(bucket) for bucket in plan["buckets"]]
    compiled = next(spec for spec in cuda.minisgl_layer_ops() if spec.variant == "cpp")
    chosen = {
        "attention": next(spec for spec in minisgl_fa.plugin.minisgl_attention_backends() if spec.variant == "fa3"),
        "kv": next(spec for spec in cuda.minisgl_kv_kernels() if spec.variant == "cpp"),
        "linear": next(iter(cuda.minisgl_linears())),
        "moe": next(iter(minisgl_moe.plugin.minisgl_moe_executors())),
        "route": next(iter(minisgl_moe.plugin.minisgl_layer_ops())),
        **dict.fromkeys(compiled.caps[0].ops, compiled),
    }
    for bucket in buckets:
        spec = chosen.get(bucket["op"] or bucket["role"])
        if spec is not None:
            bucket["choice"] = {**bucket["choice"], **_as_chosen(spec)}
    return {**plan, "buckets": buckets}


def _as_chosen(spec: BackendSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "variant": spec.variant,
        "factory": spec.factory,
        "options_model": spec.options,
        "ops": list(spec.caps[0].ops),
    }


def build_engine(folder: Path, geometry: dict[str, Any], layers: int) -> Engine:
    """An engine with ``layers`` layers; kernels must be free already."""
    (folder / "config.json").write_text(json.dumps({**geometry, "num_hidden_layers": layers}))
    config: dict[str, Any] = {
        "model_path": str(folder),
        "device": "cpu",
        "max_running_req": ROWS,
        "num_page_override": ROWS * ROW_TOKENS,
        "page_size": 1,
        "cuda_graph_max_bs": 0,
        "dummy_weights": True,
        "progress": False,
    }
    plan = make_plan(EngineConfig(**config), read_model_config(str(folder))).to_json()
    engine = Engine(EngineConfig(**config, plan=gpu_plan(plan)))
    for row in range(ROWS):
        engine.state.set_slots(row, 0, np.arange(ROW_TOKENS, dtype=np.int32) + row * ROW_TOKENS)
    return engine


def microseconds(engines: Iterable[Engine]) -> list[float]:
    """The median of the thread's CPU time of one pass, per engine; they take turns."""
    ids, params = torch.arange(ROW_TOKENS, dtype=torch.int32), SamplingParams()
    times: list[list[int]] = [[] for _ in engines]
    for turn in range(WARM_PASSES + PASSES):
        for engine, seconds in zip(engines, times, strict=True):
            batch = Batch([Req(ids, row, 0, 8, row, params) for row in range(ROWS)], "prefill")
            begin = time.thread_time_ns()
            engine.forward_batch(batch, engine.sampler.prepare(batch))
            if turn >= WARM_PASSES:
                seconds.append(time.thread_time_ns() - begin)
    return [statistics.median(seconds) / 1000 for seconds in times]


def main() -> None:
    """Build, measure, print."""
    parser = Parser(__doc__)
    parser.add_argument("--experts", action="store_true", help="every layer has 128 experts, 8 of them for each token")
    sparse = parser.parse_args().experts
    if shutil.which("cc") is None:
        raise UsageError("there is no C compiler `cc`", field="cc", remedy="install one, such as gcc")
    geometry = {**GEOMETRY, **EXPERTS} if sparse else GEOMETRY
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # buffers that no kernel fills contain arbitrary numbers, whose products may be slow
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if sparse:
            stack.enter_context(free_experts(folder))
        stack.enter_context(free_kernels(folder))
        engines = [build_engine(folder, geometry, layers) for layers in (LAYERS, FEW_LAYERS)]
        whole, few = microseconds(engines)
        for engine in engines:
            engine.shutdown()
    layer = (whole - few) / (LAYERS - FEW_LAYERS)
    print(f"{whole:.0f} us per pass of {LAYERS} layers: {layer:.1f} us per layer, {whole - LAYERS * layer:.0f} us once")


if __name__ == "__main__":
    raise SystemExit(run(main))
