"""The backends of minisgl-moe, as plain records; nothing heavy is imported here."""

from __future__ import annotations

from minisgl_core.plugin_api import BackendSpec, Caps, PluginInfo, hookimpl

__all__ = [
    "MINISGL_PLUGIN",
    "minisgl_layer_ops",
    "minisgl_moe_executors",
]

MINISGL_PLUGIN = PluginInfo(name="moe", api={"moe": ">=1.1,<2", "ops": ">=1,<2"})

_SM = (80, 121)
_FLOATS = ("bfloat16", "float16", "float32")


@hookimpl
def minisgl_moe_executors() -> list[BackendSpec]:
    """Grouped matrix products over the tokens of each expert."""
    return [
        BackendSpec(
            role="moe",
            name="fused",
            factory="minisgl_moe.executor:FusedMoE",
            requires=("import:triton",),
            caps=(Caps(devices=("cuda",), sm=_SM, dtypes=_FLOATS, graph="decode"),),
            options="minisgl_moe.options:FusedMoEOptions",
            tier=10,
            summary="expert alignment and grouped matrix products in Triton",
        )
    ]


@hookimpl
def minisgl_layer_ops() -> list[BackendSpec]:
    """Routing: softmax, top-k and renormalisation in one kernel."""
    return [
        BackendSpec(
            role="ops",
            name="fused_route",
            factory="minisgl_moe.routing:FusedRouting",
            requires=("import:triton",),
            caps=(Caps(devices=("cuda",), sm=_SM, dtypes=_FLOATS, graph="decode", ops=("route",)),),
            tier=10,
            summary="top-k routing in Triton",
        )
    ]
