"""The entry point: the backends of minisgl-cpu-sim. Imports nothing heavy."""

from __future__ import annotations

from typing import Final

from minisgl_core.plugin_api import ANY, FUSABLE_OPS, OP_NAMES, BackendSpec, Caps, PluginInfo, hookimpl

__all__ = ["MINISGL_PLUGIN"]

MINISGL_PLUGIN = PluginInfo(
    name="cpu_sim",
    api={**dict.fromkeys(("attention", "graph", "kv", "moe", "ops"), ">=1,<2"), "linear": ">=1.2,<2"},
)

_DTYPES: Final = ("float32", "bfloat16", "float16")
_COMPILED: Final = "minisgl_cpu_sim.native.build:check"
"""The check that the native kernels, which are compiled at first use, can be compiled."""


def _attention_caps(*devices: str) -> Caps:
    return Caps(
        devices=devices,
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
    )


def _kv_caps(*devices: str) -> Caps:
    return Caps(
        devices=devices,
        sm=ANY,
        dtypes=_DTYPES,
        kv_dtypes=_DTYPES,
        head_dims=ANY,
        page_sizes=ANY,
        kv_layouts=("NHD",),
        graph="decode",
    )


@hookimpl
def minisgl_attention_backends() -> list[BackendSpec]:
    """``cpu`` and ``torch``."""
    return [
        BackendSpec(
            role="attention",
            name="cpu",
            factory="minisgl_cpu_sim.native.attention:NativeAttention",
            check=_COMPILED,
            caps=(_attention_caps("cpu"),),
            tier=10,
            summary="C++: blocked prefill, split decode",
        ),
        BackendSpec(
            role="attention",
            name="torch",
            factory="minisgl_cpu_sim.pure.attention:TorchAttention",
            caps=(_attention_caps("cpu", "cuda"),),
            tier=90,
            stand_in=True,
            summary="plain torch, float32 inside: the reference",
        ),
    ]


@hookimpl
def minisgl_kv_kernels() -> list[BackendSpec]:
    """``cpu`` and ``torch``."""
    return [
        BackendSpec(
            role="kv",
            name="cpu",
            factory="minisgl_cpu_sim.native.kv:NativeKV",
            check=_COMPILED,
            caps=(_kv_caps("cpu"),),
            tier=10,
            summary="C++: rows moved as bytes",
        ),
        BackendSpec(
            role="kv",
            name="torch",
            factory="minisgl_cpu_sim.pure.kv:TorchKV",
            caps=(_kv_caps("cpu", "cuda"),),
            tier=90,
            stand_in=True,
            summary="plain torch: indexed reads and writes",
        ),
    ]


@hookimpl
def minisgl_moe_executors() -> list[BackendSpec]:
    """``cpu`` and ``torch``."""
    return [
        BackendSpec(
            role="moe",
            name="cpu",
            factory="minisgl_cpu_sim.native.moe:NativeMoE",
            check=_COMPILED,
            caps=(Caps(devices=("cpu",), dtypes=_DTYPES, graph="decode"),),
            tier=10,
            summary="C++: tokens grouped by expert",
        ),
        BackendSpec(
            role="moe",
            name="torch",
            factory="minisgl_cpu_sim.pure.moe:TorchMoE",
            caps=(
                Caps(devices=("cpu",), dtypes=_DTYPES, graph="decode"),
                Caps(devices=("cuda",), sm=ANY, dtypes=_DTYPES, graph="never"),
            ),
            tier=90,
            stand_in=True,
            summary="plain torch: tokens sorted by expert",
        ),
    ]


@hookimpl
def minisgl_layer_ops() -> list[BackendSpec]:
    """``cpu``."""
    return [
        BackendSpec(
            role="ops",
            name="cpu",
            factory="minisgl_cpu_sim.native.ops:NativeOps",
            check=_COMPILED,
            caps=(
                Caps(
                    devices=("cpu",),
                    dtypes=_DTYPES,
                    kv_dtypes=_DTYPES,
                    head_dims=ANY,
                    page_sizes=ANY,
                    kv_layouts=("NHD",),
                    graph="decode",
                    ops=OP_NAMES,
                    per_row_seed=True,
                ),
            ),
            tier=10,
            summary="C++: one pass each",
        )
    ]


@hookimpl
def minisgl_linears() -> list[BackendSpec]:
    """``cpu`` and ``fused``."""
    return [
        BackendSpec(
            role="linear",
            name="cpu",
            factory="minisgl_cpu_sim.native.linear:NativeLinear",
            check=_COMPILED,
            caps=(Caps(devices=("cpu",), dtypes=_DTYPES, graph="decode", formats=("plain",)),),
            tier=10,
            summary="C++: skinny products at memory speed, blocked ones above",
        ),
        BackendSpec(
            role="linear",
            name="fused",
            factory="minisgl_cpu_sim.pure.linear:FusedTorchLinear",
            caps=(Caps(devices=("cpu",), dtypes=_DTYPES, graph="decode", formats=("plain",), ops=FUSABLE_OPS),),
            tier=95,  # after the core's own, which is as fast and fuses nothing
            stand_in=True,
            summary="torch's products with the norm before and the activation behind: runs the core's fused path",
        ),
    ]


@hookimpl
def minisgl_graph_runners() -> list[BackendSpec]:
    """``emulated``."""
    return [
        BackendSpec(
            role="graph",
            name="emulated",
            factory="minisgl_cpu_sim.graph:EmulatedGraphRunner",
            caps=(Caps(devices=("cpu",), graph="decode"),),
            options="minisgl_cpu_sim.graph.options:EmulatedGraphOptions",
            stand_in=True,
            summary="records a step's operations and replays them, as a CUDA graph would",
        )
    ]
