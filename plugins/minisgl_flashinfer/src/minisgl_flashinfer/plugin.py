"""The backends of minisgl-flashinfer, as plain records; nothing heavy is imported here."""

from __future__ import annotations

from minisgl_core.plugin_api import ANY, BackendSpec, Caps, OneOf, PluginInfo, hookimpl

__all__ = [
    "MINISGL_PLUGIN",
    "minisgl_attention_backends",
    "minisgl_layer_ops",
]

MINISGL_PLUGIN = PluginInfo(name="flashinfer", api={"attention": ">=1,<2", "ops": ">=1,<2"})

_SM = (80, 121)
_HALF = ("bfloat16", "float16")


@hookimpl
def minisgl_attention_backends() -> list[BackendSpec]:
    """Plan once per batch on the host, run once per layer."""
    return [
        BackendSpec(
            role="attention",
            name="flashinfer",
            factory="minisgl_flashinfer.attention:FlashInferAttention",
            requires=("import:flashinfer",),
            caps=tuple(
                Caps(
                    devices=("cuda",),
                    sm=_SM,
                    dtypes=(dtype,),
                    kv_dtypes=(dtype,),
                    head_dims=OneOf(64, 128, 256),
                    gqa_ratios=ANY,
                    page_sizes=ANY,
                    kv_layouts=("NHD", "HND"),
                    phases=("prefill", "decode"),
                    graph="decode",
                    features=frozenset({"window", "softcap"}),
                    host_plan=True,
                )
                for dtype in _HALF
            ),
            options="minisgl_flashinfer.options:FlashInferOptions",
            tier=20,
            summary="FlashInfer paged attention",
        )
    ]


@hookimpl
def minisgl_layer_ops() -> list[BackendSpec]:
    """Sampling. FlashInfer accepts a seed per row but uses the first row's for all: ``per_row_seed`` stays False."""
    return [
        BackendSpec(
            role="ops",
            name="flashinfer",
            factory="minisgl_flashinfer.sampling:FlashInferSampling",
            requires=("import:flashinfer",),
            caps=(
                Caps(
                    devices=("cuda",),
                    sm=_SM,
                    dtypes=(*_HALF, "float32"),
                    graph="decode",
                    ops=("sample",),
                ),
            ),
            tier=20,
            summary="FlashInfer sampling",
        )
    ]
