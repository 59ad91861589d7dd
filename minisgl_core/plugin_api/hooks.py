"""The hooks a plugin may implement. All are collected once at start-up; none is on the per-token path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

from .spec import BackendSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["HOOK_OF_ROLE", "PROJECT", "hookimpl", "hookspec"]

PROJECT = "minisgl"
CORE = "minisgl-core"
"""The distribution of the core and of its built-in backends."""
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

HOOK_OF_ROLE = {
    "attention": "minisgl_attention_backends",
    "graph": "minisgl_graph_runners",
    "kv": "minisgl_kv_kernels",
    "moe": "minisgl_moe_executors",
    "ops": "minisgl_layer_ops",
    "linear": "minisgl_linears",
    "comm": "minisgl_communicators",
    "platform": "minisgl_platforms",
    "models": "minisgl_models",
    "grammar": "minisgl_grammars",
    "parser": "minisgl_parsers",
}
"""Which hook offers the backends of each role."""


@hookspec
def minisgl_attention_backends() -> list[BackendSpec]:  # type: ignore[empty-body]
    """Offer attention backends (role ``attention``)."""


@hookspec
def minisgl_graph_runners() -> list[BackendSpec]:  # type: ignore[empty-body]
    """Offer graph runners (role ``graph``)."""


@hookspec
def minisgl_kv_kernels() -> list[BackendSpec]:  # type: ignore[empty-body]
    """Offer KV store and gather kernels (role ``kv``)."""


@hookspec
def minisgl_moe_executors() -> list[BackendSpec]:  # type: ignore[empty-body]
    """Offer mixture-of-experts executors (role ``moe``)."""


@hookspec
def minisgl_layer_ops() -> list[BackendSpec]:  # type: ignore[empty-body]
    """Offer fused layer operations, any subset (role ``ops``)."""


@hookspec
def minisgl_linears() -> list[BackendSpec]:  # type: ignore[empty-body]
    """Offer matrix products and weight formats (role ``linear``)."""


@hookspec
def minisgl_communicators() -> list[BackendSpec]:  # type: ignore[empty-body]
    """Offer tensor-parallel collectives (role ``comm``)."""


@hookspec
def minisgl_platforms() -> list[BackendSpec]:  # type: ignore[empty-body]
    """Offer devices: streams, events, pinned memory, capture (role ``platform``)."""


@hookspec
def minisgl_models() -> list[BackendSpec]:  # type: ignore[empty-body]
    """Offer model classes; a spec's caps name the architectures (role ``models``)."""


@hookspec
def minisgl_grammars() -> list[BackendSpec]:  # type: ignore[empty-body]
    """Offer libraries that keep answers to a grammar (role ``grammar``)."""


@hookspec
def minisgl_parsers() -> list[BackendSpec]:  # type: ignore[empty-body]
    """Offer parsers of answers: of reasoning, of tool calls (role ``parser``)."""


@hookspec
def minisgl_plan_resolved(plan: Mapping[str, object]) -> None:
    """Observe the plan, as plain JSON data, once it is resolved."""
