"""What the core offers itself: an eager graph runner, torch.distributed, two platforms, plain torch maths, the models.

This module is imported at discovery, so it holds specs only; the implementations are imported when they are chosen.
"""

from __future__ import annotations

from typing import Final

from minisgl_core.plugin_api import (
    ANY,
    GRAMMAR_KINDS,
    OP_NAMES,
    PARSER_PARTS,
    ROLES,
    BackendSpec,
    Caps,
    PluginInfo,
    Role,
    hookimpl,
)

__all__ = ["MINISGL_PLUGIN"]

_OWN_ROLES: Final[tuple[Role, ...]] = ("graph", "ops", "linear", "comm", "platform", "models", "grammar", "parser")

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


@hookimpl
def minisgl_parsers() -> list[BackendSpec]:
    """The forms of known chat templates, and ``none`` for all others."""
    package = "minisgl_core.builtin.parsers"
    return [
        BackendSpec(
            role="parser",
            name="qwen3_coder",
            factory=f"{package}.formats:Qwen3CoderParser",
            caps=(Caps(ops=("tools",), templates=("<tool_call>", "<function=", "<parameter=")),),
            tier=40,  # its templates hold the marker of hermes too
            summary="tool calls of Qwen3-Coder",
        ),
        BackendSpec(
            role="parser",
            name="hermes",
            factory=f"{package}.formats:HermesParser",
            caps=(Caps(ops=("tools",), templates=("<tool_call>",)),),
            summary="tool calls of Hermes, Qwen2.5 and Qwen3",
        ),
        BackendSpec(
            role="parser",
            name="llama3",
            factory=f"{package}.formats:Llama3Parser",
            caps=(
                Caps(ops=("tools",), templates=("<|python_tag|>",)),
                Caps(ops=("tools",), templates=("<|start_header_id|>", '"parameters":')),
            ),
            summary="tool calls of Llama 3.1 to 3.3",
        ),
        BackendSpec(
            role="parser",
            name="deepseek",
            factory=f"{package}.formats:DeepSeekParser",
            caps=(Caps(ops=("tools",), templates=("<\uff5ctool\u2581call\u2581begin\uff5c>",)),),
            summary="tool calls of DeepSeek V3, V3.1 and R1",
        ),
        BackendSpec(
            role="parser",
            name="think",
            factory=f"{package}.think:ThinkParser",
            caps=(Caps(ops=("reasoning",), templates=("</think>",)),),
            summary="reasoning of DeepSeek-R1, QwQ and Qwen3",
        ),
        BackendSpec(
            role="parser",
            name="none",
            factory=f"{package}.plain:PlainParser",
            caps=(Caps(ops=PARSER_PARTS, templates=ANY),),
            tier=90,
            summary="all text is content",
        ),
    ]
