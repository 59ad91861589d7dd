"""The backends of minisgl-fa, as plain records; nothing heavy is imported here.

There is one name with three variants: the device and the installed libraries decide which FlashAttention is used.
"""

from __future__ import annotations

from dataclasses import replace

from minisgl_core.plugin_api import ANY, BackendSpec, Caps, MultipleOf, OneOf, PluginInfo, hookimpl

__all__ = [
    "MINISGL_PLUGIN",
    "minisgl_attention_backends",
]

MINISGL_PLUGIN = PluginInfo(name="fa", api={"attention": ">=1,<2"})

_HALF = ("bfloat16", "float16")
_OPTIONS = "minisgl_fa.options:FlashAttentionOptions"

_FA3 = Caps(
    devices=("cuda",),
    sm=(90, 90),
    head_dims=OneOf(64, 128, 192, 256),
    gqa_ratios=ANY,
    page_sizes=ANY,
    kv_layouts=("NHD",),
    phases=("prefill", "decode"),
    graph="decode",
    features=frozenset({"window"}),
    finite_tail=True,  # prefill over large pages loads them whole and multiplies the masked part by zero
)
_FA4 = Caps(
    devices=("cuda",),
    sm=(100, 100),
    head_dims=OneOf(64, 128),
    gqa_ratios=ANY,
    page_sizes=OneOf(128),
    kv_layouts=("NHD",),
    phases=("prefill", "decode"),
    graph="decode",
    features=frozenset({"window"}),
    finite_tail=True,
)
_FA2 = Caps(
    devices=("cuda",),
    sm=(80, 89),
    head_dims=OneOf(32, 64, 80, 96, 128, 160, 192, 224, 256),
    gqa_ratios=ANY,
    page_sizes=MultipleOf(256),
    kv_layouts=("NHD",),
    phases=("prefill", "decode"),
    graph="decode",
    features=frozenset({"window", "softcap"}),
)


def _per_dtype(caps: Caps) -> tuple[Caps, ...]:
    """One capability set per dtype, because queries and cache must have the same."""
    return tuple(replace(caps, dtypes=(dtype,), kv_dtypes=(dtype,)) for dtype in _HALF)


@hookimpl
def minisgl_attention_backends() -> list[BackendSpec]:
    """FlashAttention 3 on Hopper, 4 on Blackwell, 2 on Ampere and Ada; no host plan."""
    return [
        BackendSpec(
            role="attention",
            name="fa",
            variant="fa3",
            factory="minisgl_fa.fa3:FlashAttention3",
            requires=("import:flash_attn_interface",),
            caps=_per_dtype(_FA3),
            options=_OPTIONS,
            tier=10,
            summary="FlashAttention 3",
        ),
        BackendSpec(
            role="attention",
            name="fa",
            variant="fa4",
            factory="minisgl_fa.fa4:FlashAttention4",
            requires=("import:flash_attn.cute",),
            caps=_per_dtype(_FA4),
            options=_OPTIONS,
            tier=11,
            summary="FlashAttention 4",
        ),
        BackendSpec(
            role="attention",
            name="fa",
            variant="fa2",
            factory="minisgl_fa.fa2:FlashAttention2",
            requires=("import:flash_attn.flash_attn_interface",),
            caps=_per_dtype(_FA2),
            options=_OPTIONS,
            tier=12,
            summary="FlashAttention 2",
        ),
    ]
