"""What the core offers itself: an eager graph runner, torch.distributed, two platforms, plain torch maths, the models.

This module is imported at discovery, so it holds specs only; the implementations are imported when they are chosen.
"""

from __future__ import annotations

from typing import Final

from minisgl_core.plugin_api import ANY, GRAMMAR_KINDS, OP_NAMES, ROLES, BackendSpec, Caps, PluginInfo, Role, hookimpl

__all__ = ["MINISGL_PLUGIN"]

_OWN_ROLES: Final[tuple[Role, ...]] = ("graph", "ops", "linear", "comm", "platform", "models", "grammar")

MINISGL_PLUGIN = PluginInfo(name="core", api={role: ">=1,<2" for role in ROLES if role in _OWN_ROLES})

_ANYWHERE: Final = ("cpu", "cuda")
_DTYPES: Final = ("float32", "bfloat16", "float16")

_MODELS: Final = (
    ("llama", "LlamaForCausalLM"),
    ("mistral", "MistralForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen2_moe", "Qwen2MoeForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("qwen3_moe", "Qwen3MoeForCausalLM"),
)


@hookimpl
def minisgl_graph_runners() -> list[BackendSpec]:
    """``eager``: every step runs as Python; it never captures."""
    return [
        BackendSpec(
            role="graph",
            name="eager",
            factory="minisgl_core.builtin.graph:EagerGraphRunner",
            caps=(Caps(devices=_ANYWHERE, sm=ANY, graph="never"),),
            tier=0,  # it fits only where no graphs are requested, and then it is all that is needed
            summary="runs each step eagerly",
        )
    ]


@hookimpl
def minisgl_layer_ops() -> list[BackendSpec]:
    """``composed``: every operation in plain torch, the meaning that faster backends are compared with."""
    return [
        BackendSpec(
            role="ops",
            name="composed",
            factory="minisgl_core.builtin.ops:ComposedOps",
            caps=(
                Caps(
                    devices=_ANYWHERE,
                    sm=ANY,
                    dtypes=_DTYPES,
                    kv_dtypes=ANY,
                    head_dims=ANY,
                    page_sizes=ANY,
                    kv_layouts=("NHD",),
                    graph="decode",
                    ops=OP_NAMES,
                    per_row_seed=True,
                ),
            ),
            tier=90,
            summary="plain torch",
        )
    ]


@hookimpl
def minisgl_linears() -> list[BackendSpec]:
    """``plain``: torch's own matrix product on unquantised weights."""
    return [
        BackendSpec(
            role="linear",
            name="plain",
            factory="minisgl_core.builtin.linear:PlainLinear",
            caps=(Caps(devices=_ANYWHERE, sm=ANY, dtypes=_DTYPES, graph="decode", formats=("plain",)),),
            tier=90,
            summary="torch.nn.functional.linear",
        )
    ]


@hookimpl
def minisgl_communicators() -> list[BackendSpec]:
    """``torch_dist``: gloo on a CPU, NCCL on CUDA devices."""
    return [
        BackendSpec(
            role="comm",
            name="torch_dist",
            factory="minisgl_core.builtin.comm:TorchDistCommunicator",
            caps=(Caps(devices=_ANYWHERE, sm=ANY, dtypes=_DTYPES, graph="decode"),),
            tier=90,
            summary="torch.distributed: gloo or NCCL",
        )
    ]


@hookimpl
def minisgl_platforms() -> list[BackendSpec]:
    """``cpu`` and ``cuda``."""
    return [
        BackendSpec(
            role="platform",
            name="cpu",
            factory="minisgl_core.builtin.platform:CpuPlatform",
            caps=(Caps(devices=("cpu",)),),
            summary="host memory, no streams",
        ),
        BackendSpec(
            role="platform",
            name="cuda",
            factory="minisgl_core.builtin.platform:CudaPlatform",
            caps=(Caps(devices=("cuda",), sm=ANY),),
            summary="one NVIDIA device through torch.cuda",
        ),
    ]


@hookimpl
def minisgl_models() -> list[BackendSpec]:
    """The decoder-only families that the core knows."""
    return [
        BackendSpec(
            role="models",
            name=name,
            factory="minisgl_core.models.decoder:DecoderForCausalLM",
            caps=(Caps(architectures=(architecture,)),),
            summary=architecture,
        )
        for name, architecture in _MODELS
    ]


@hookimpl
def minisgl_grammars() -> list[BackendSpec]:
    """``none``: what remains where no library is installed; it refuses every grammar and says what to install."""
    return [
        BackendSpec(
            role="grammar",
            name="none",
            factory="minisgl_core.builtin.grammar:NoGrammar",
            caps=(Caps(grammars=GRAMMAR_KINDS),),
            tier=90,
            summary="requests with a grammar are refused",
        )
    ]
