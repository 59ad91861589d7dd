"""The backends of minisgl-cuda, as plain records; nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import replace

from minisgl_core.plugin_api import ANY, FUSABLE_OPS, BackendSpec, Caps, OneOf, PluginInfo, hookimpl

__all__ = [
    "MINISGL_PLUGIN",
    "minisgl_attention_backends",
    "minisgl_graph_runners",
    "minisgl_kv_kernels",
    "minisgl_layer_ops",
    "minisgl_linears",
]

MINISGL_PLUGIN = PluginInfo(
    name="cuda",
    api={"attention": ">=1,<2", "graph": ">=1,<2", "kv": ">=1,<2", "linear": ">=1.2,<2", "ops": ">=1,<2"},
)

_SM = (80, 121)
_HALF = ("bfloat16", "float16")
_FLOATS = ("bfloat16", "float16", "float32")
_KV_CAPS = Caps(
    devices=("cuda",),
    sm=_SM,
    dtypes=_FLOATS,
    kv_dtypes=_FLOATS,
    head_dims=ANY,
    page_sizes=ANY,
    kv_layouts=("NHD",),
    graph="decode",
)


@hookimpl
def minisgl_graph_runners() -> list[BackendSpec]:
    """CUDA graphs of whole decode steps."""
    return [
        BackendSpec(
            role="graph",
            name="cuda",
            factory="minisgl_cuda.graph:CudaGraphRunner",
            caps=(Caps(devices=("cuda",), sm=_SM, graph="decode"),),
            tier=10,
            summary="CUDA graph runner",
        )
    ]


@hookimpl
def minisgl_kv_kernels() -> list[BackendSpec]:
    """Row scatter and gather: in CUDA C++ if there is a compiler, else in Triton."""
    return [
        BackendSpec(
            role="kv",
            name="cuda",
            variant="cpp",
            factory="minisgl_cuda.kv_cpp:CudaKVKernels",
            probe="minisgl_cuda.kv_build:probe",
            requires=("exec:nvcc",),
            caps=(_KV_CAPS,),
            tier=10,
            summary="KV store and gather in CUDA C++",
        ),
        BackendSpec(
            role="kv",
            name="cuda",
            variant="triton",
            factory="minisgl_cuda.kv_triton:TritonKVKernels",
            requires=("import:triton",),
            caps=(_KV_CAPS,),
            tier=11,
            summary="KV store and gather in Triton",
        ),
    ]


@hookimpl
def minisgl_attention_backends() -> list[BackendSpec]:
    """Split-KV decode attention that needs no host plan."""
    return [
        BackendSpec(
            role="attention",
            name="cuda_decode",
            factory="minisgl_cuda.attention:CudaDecodeAttention",
            requires=("import:triton",),
            options="minisgl_cuda.options:DecodeOptions",
            # A capability set per dtype: queries and cache must have the same.
            caps=tuple(
                Caps(
                    devices=("cuda",),
                    sm=_SM,
                    dtypes=(dtype,),
                    kv_dtypes=(dtype,),
                    head_dims=OneOf(64, 80, 96, 128, 256),
                    gqa_ratios=ANY,
                    page_sizes=ANY,
                    kv_layouts=("NHD",),
                    phases=("decode",),
                    graph="decode",
                    features=frozenset({"window", "softcap"}),
                )
                for dtype in _FLOATS
            ),
            tier=5,
            summary="planless split-KV decode attention",
        )
    ]


_LAYER_OPS = ("rms_norm", "add_rms_norm", "allreduce_add_rms_norm", "qk_norm_rope_store", "act_and_mul")
_OPS_CAPS = Caps(
    devices=("cuda",),
    sm=_SM,
    dtypes=_FLOATS,
    kv_dtypes=_FLOATS,
    head_dims=ANY,
    page_sizes=ANY,
    kv_layouts=("NHD",),
    graph="decode",
    ops=(*_LAYER_OPS, "sample"),
    per_row_seed=True,
)


@hookimpl
def minisgl_layer_ops() -> list[BackendSpec]:
    """The fused operations between matrix products: in CUDA C++ if there is a compiler, else in Triton."""
    return [
        BackendSpec(
            role="ops",
            name="cuda",
            variant="cpp",
            factory="minisgl_cuda.ops_cpp:CompiledOps",
            probe="minisgl_cuda.kv_build:probe",
            requires=("exec:nvcc",),
            caps=tuple(
                # Rows are stored without conversion: the pool has the model's dtype.
                replace(_OPS_CAPS, dtypes=(dtype,), kv_dtypes=(dtype,), ops=_LAYER_OPS, per_row_seed=False)
                for dtype in _FLOATS
            ),
            tier=10,
            summary="fused norms, rotary embedding and activation in CUDA C++",
        ),
        BackendSpec(
            role="ops",
            name="cuda",
            variant="triton",
            factory="minisgl_cuda.ops:CudaOps",
            requires=("import:triton",),
            caps=(_OPS_CAPS,),
            tier=11,
            summary="fused norms, rotary embedding, activation and sampling in Triton",
        ),
    ]


@hookimpl
def minisgl_linears() -> list[BackendSpec]:
    """Matrix products of few rows, which are bound by memory bandwidth."""
    return [
        BackendSpec(
            role="linear",
            name="skinny",
            factory="minisgl_cuda.linear:SkinnyLinear",
            requires=("import:triton",),
            options="minisgl_cuda.options:SkinnyOptions",
            caps=(
                Caps(
                    devices=("cuda",),
                    sm=_SM,
                    dtypes=_HALF,
                    graph="decode",
                    formats=("plain",),
                    ops=FUSABLE_OPS,
                ),
            ),
            tier=10,
            summary="matrix products of up to 16 rows, with the norm before and the activation behind",
        )
    ]
