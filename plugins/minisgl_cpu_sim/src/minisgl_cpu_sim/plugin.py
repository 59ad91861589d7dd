"""The entry point: what minisgl-cpu-sim offers. Imports nothing heavy."""

from __future__ import annotations

from minisgl_core.plugin_api import ANY, BackendSpec, Caps, PluginInfo, hookimpl

__all__ = [
    "MINISGL_PLUGIN",
    "minisgl_attention_backends",
    "minisgl_graph_runners",
    "minisgl_kv_kernels",
    "minisgl_moe_executors",
]

MINISGL_PLUGIN = PluginInfo(
    name="cpu_sim",
    api={role: ">=1,<2" for role in ("attention", "graph", "kv", "moe")},
)

_DTYPES = ("float32", "bfloat16", "float16")


@hookimpl
def minisgl_attention_backends() -> list[BackendSpec]:
    """``attention:torch``."""
    return [
        BackendSpec(
            role="attention",
            name="torch",
            factory="minisgl_cpu_sim.pure.attention:TorchAttention",
            caps=(
                Caps(
                    devices=("cpu", "cuda"),
                    sm=ANY,
                    dtypes=_DTYPES,
                    kv_dtypes=_DTYPES,
                    head_dims=ANY,
                    gqa_ratios=ANY,
                    page_sizes=ANY,
                    kv_layouts=("NHD",),
                    phases=("prefill", "decode"),
                    graph="decode",
                    features=frozenset({"window", "softcap"}),
                ),
            ),
            tier=90,
            stand_in=True,
            summary="paged attention in plain torch, float32 inside: the reference",
        )
    ]


@hookimpl
def minisgl_kv_kernels() -> list[BackendSpec]:
    """``kv:torch``."""
    return [
        BackendSpec(
            role="kv",
            name="torch",
            factory="minisgl_cpu_sim.pure.kv:TorchKV",
            caps=(
                Caps(
                    devices=("cpu", "cuda"),
                    sm=ANY,
                    dtypes=_DTYPES,
                    kv_dtypes=_DTYPES,
                    head_dims=ANY,
                    page_sizes=ANY,
                    kv_layouts=("NHD",),
                    graph="always",
                ),
            ),
            tier=90,
            stand_in=True,
            summary="row scatter and gather in plain torch",
        )
    ]


@hookimpl
def minisgl_moe_executors() -> list[BackendSpec]:
    """``moe:torch``."""
    return [
        BackendSpec(
            role="moe",
            name="torch",
            factory="minisgl_cpu_sim.pure.moe:TorchMoE",
            caps=(
                Caps(devices=("cpu",), dtypes=_DTYPES, graph="always"),
                Caps(devices=("cuda",), sm=ANY, dtypes=_DTYPES, graph="never"),
            ),
            tier=90,
            stand_in=True,
            summary="routed experts in plain torch, tokens sorted by expert",
        )
    ]


@hookimpl
def minisgl_graph_runners() -> list[BackendSpec]:
    """``graph:emulated``."""
    return [
        BackendSpec(
            role="graph",
            name="emulated",
            factory="minisgl_cpu_sim.graph:EmulatedGraphRunner",
            caps=(Caps(devices=("cpu",), graph="always"),),
            options="minisgl_cpu_sim.graph.options:EmulatedGraphOptions",
            stand_in=True,
            summary="records a step's operations and replays them, as a CUDA graph would",
        )
    ]
