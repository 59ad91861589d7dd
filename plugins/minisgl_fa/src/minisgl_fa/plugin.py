"""What minisgl-fa offers: plain records, nothing heavy is imported here.

One name, three variants: which FlashAttention serves a device follows from the device and from what is installed.
This release holds the specs and not yet the code that calls FlashAttention. Every spec therefore also requires the
module of its own factory: as long as that module is not shipped, resolving refuses the backend and says so.
"""

from __future__ import annotations

from minisgl_core.plugin_api import ANY, BackendSpec, Caps, MultipleOf, OneOf, PluginInfo, hookimpl

__all__ = [
    "MINISGL_PLUGIN",
    "minisgl_attention_backends",
]

MINISGL_PLUGIN = PluginInfo(name="fa", api={"attention": ">=1,<2"})

_HALF = ("bfloat16", "float16")

_FA3 = Caps(
    devices=("cuda",),
    sm=(90, 90),
    dtypes=_HALF,
    kv_dtypes=_HALF,
    head_dims=OneOf(64, 128, 192, 256),
    gqa_ratios=ANY,
    page_sizes=ANY,
    kv_layouts=("NHD",),
    phases=("prefill", "decode"),
    graph="decode",
    features=frozenset({"window"}),
    finite_tail=True,  # whole pages are loaded and the masked part is multiplied by zero
)
_FA4 = Caps(
    devices=("cuda",),
    sm=(100, 100),
    dtypes=_HALF,
    kv_dtypes=_HALF,
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
    dtypes=_HALF,
    kv_dtypes=_HALF,
    head_dims=OneOf(32, 64, 80, 96, 128, 160, 192, 224, 256),
    gqa_ratios=ANY,
    page_sizes=MultipleOf(256),
    kv_layouts=("NHD",),
    phases=("prefill", "decode"),
    graph="decode",
    features=frozenset({"window", "softcap"}),
)


@hookimpl
def minisgl_attention_backends() -> list[BackendSpec]:
    """FlashAttention 3 on Hopper, 4 on Blackwell, 2 on Ampere and Ada; no host plan."""
    return [
        BackendSpec(
            role="attention",
            name="fa",
            variant="fa3",
            factory="minisgl_fa.fa3:FlashAttention3",
            requires=("import:minisgl_fa.fa3", "import:flash_attn_interface"),
            caps=(_FA3,),
            tier=10,
            summary="FlashAttention 3",
        ),
        BackendSpec(
            role="attention",
            name="fa",
            variant="fa4",
            factory="minisgl_fa.fa4:FlashAttention4",
            requires=("import:minisgl_fa.fa4", "import:flash_attn.cute"),
            caps=(_FA4,),
            tier=11,
            summary="FlashAttention 4",
        ),
        BackendSpec(
            role="attention",
            name="fa",
            variant="fa2",
            factory="minisgl_fa.fa2:FlashAttention2",
            requires=("import:minisgl_fa.fa2", "import:flash_attn.flash_attn_interface"),
            caps=(_FA2,),
            tier=12,
            summary="FlashAttention 2",
        ),
    ]
